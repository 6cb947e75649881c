"""What arguments may be, said where they are wrong."""

import re
from collections.abc import Collection, Sequence
from typing import Literal

Precision = Literal["float32", "bfloat16"]
MOST_PIXELS = 2**14  # of a side
MOST_SHOWN = 200  # characters of a value in a message


def shorten(text: str, most: int = MOST_SHOWN) -> str:
    """`text` for a message: its middle left out where it is longer than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def first_line(error: BaseException) -> str:
    """What an error of another library says first, without addresses in memory, or else its type."""
    return re.sub(r" at 0x[0-9a-f]+", "", (str(error).splitlines() or [type(error).__name__])[0])


def printable(text: str) -> str:
    """`text` without the control characters that a terminal obeys."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)


def as_pair(value: int | Sequence[int], *, name: str) -> tuple[int, int]:
    """(rows, columns) from one number or two."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"{name} {shorten(str(value))} is neither a positive number nor two of them (height, width)")
    if max(pair) > MOST_PIXELS:
        raise ValueError(f"{name} {shorten(str(value))} is more than {MOST_PIXELS:,} pixels a side")
    return pair


def check_choice(value: str, known: Collection[str], *, name: str) -> None:
    """Refuse a value that is none of the known ones, naming them."""
    if value not in known:
        raise ValueError(f"unknown {name} {shorten(value)!r}; known: {', '.join(sorted(known))}")
