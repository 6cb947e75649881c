"""File names as the commands read them."""

import sys
from collections.abc import Iterable, Iterator
from io import TextIOWrapper


def list_names(names: Iterable[str]) -> Iterator[str]:
    """`names`, and in the place of - the lines of standard input."""
    # file names of any bytes pass through
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in names:
        if name == "-":
            yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        else:
            yield name
