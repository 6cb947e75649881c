"""Read file names from the command line or from standard input."""

import sys
from collections.abc import Iterable, Iterator
from io import TextIOWrapper


def list_names(names: Iterable[str]) -> Iterator[str]:
    """Yield `names`, with the lines of standard input in place of -."""
    # File names may hold any bytes.
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in names:
        if name == "-":
            yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        else:
            yield name
