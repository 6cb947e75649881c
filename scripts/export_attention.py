"""`python scripts/export_attention.py …` is `vit attention …`."""

import sys

from vit.cli.main import main

main(["attention", *sys.argv[1:]])
