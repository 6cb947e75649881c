"""What arguments may be, said where they are wrong."""

import re
from collections.abc import Collection, Sequence
from typing import Literal

Precision = Literal["float32", "bfloat16"]
TrainSize = int | float | tuple[int, int]  # up to 1: a fraction of data.image_size; others are pixels
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
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"{name} {shorten(str(value))} is neither a positive number nor two of them (height, width)")
    if max(pair) > MOST_PIXELS:
        raise ValueError(f"{name} {shorten(str(value))} is more than {MOST_PIXELS:,} pixels a side")
    return pair


def resolve_image_sizes(
    image_sizes: Sequence[tuple[float, TrainSize]] | None,
    *,
    image_size: int | Sequence[int],
    patch_size: tuple[int, int],
) -> tuple[tuple[float, tuple[int, int]], ...]:
    """`train.image_sizes` in pixels (height, width), fractions of `data.image_size` rounded to whole patches. Raises
    ValueError naming the key of a size that is no multiple of the patch."""
    whole = as_pair(image_size, name="data.image_size")
    found, named = [], [("data.image_size", whole)]
    for until, size in image_sizes or ():
        if isinstance(size, int | float) and 0 < size <= 1:
            sides = zip(whole, patch_size, strict=True)
            height, width = (max(round(size * side / unit), 1) * unit for side, unit in sides)
            found.append((until, (height, width)))
        elif isinstance(size, float):
            text = f"train.image_sizes {size} is neither a fraction of data.image_size, up to 1, nor whole pixels"
            raise ValueError(f"{text}; such as [[0.6, 0.75], [1, 1]]")
        else:
            found.append((until, as_pair(size, name="train.image_sizes")))
            named.append(("train.image_sizes", found[-1][1]))
    for name, pair in named:
        for side, unit in zip(pair, patch_size, strict=True):
            lower = side // unit * unit
            check_multiple(name, side, "model.patch_size", unit, f"; try {f'{lower} or ' * bool(lower)}{lower + unit}")
    return tuple(found)


def check_multiple(name: str, value: int, unit_name: str, unit: int, cure: str = "") -> None:
    """Refuse a value that is no multiple of another."""
    if value % unit:
        raise ValueError(f"{name} {value} is not a multiple of {unit_name} {unit}{cure}")


def check_choice(value: str, known: Collection[str], *, name: str) -> None:
    """Refuse a value that is none of the known ones, naming them."""
    if value not in known:
        raise ValueError(f"unknown {name} {shorten(value)!r}; known: {', '.join(sorted(known))}")
