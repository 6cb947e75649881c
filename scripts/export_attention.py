"""`python scripts/export_attention.py …` is `vit explain …`."""

import sys

from vit.cli.main import main

main(["explain", *sys.argv[1:]])
