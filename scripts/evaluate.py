"""`python scripts/evaluate.py …` is `vit evaluate …`."""

import sys

from vit.cli.main import main

main(["evaluate", *sys.argv[1:]])
