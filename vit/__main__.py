"""`python -m vit`: the same program as the `vit` command (torchrun starts it this way)."""

from vit.cli.main import main

if __name__ == "__main__":
    main()
