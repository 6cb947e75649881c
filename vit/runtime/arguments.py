"""What arguments may be, said where they are wrong."""

from collections.abc import Collection, Sequence
from typing import Literal

Precision = Literal["float32", "bfloat16"]


def as_pair(value: int | Sequence[int], *, name: str) -> tuple[int, int]:
    """(rows, columns) from one number or two."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"{name} {value} is neither a positive number nor two of them (height, width)")
    return pair


def check_choice(value: str, known: Collection[str], *, name: str) -> None:
    """Refuse a value that is none of the known ones, naming them."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(sorted(known))}")
