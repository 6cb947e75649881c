"""`python scripts/train.py …` is `vit train …`."""

import sys

from vit.cli.main import main

main(["train", *sys.argv[1:]])
