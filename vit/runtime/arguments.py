"""Checks of arguments, and text for messages about them."""

import re
from collections.abc import Collection, Sequence
from typing import Literal

Precision = Literal["float32", "bfloat16"]
# up to 1: a fraction of data.image_size; others are pixels: of a side, or (height, width)
TrainSize = int | float | tuple[int, int]
# pixels
MAX_SIDE = 2**14
# characters of a value in a message
_MAX_SHOWN = 200


def shorten(text: str, max_characters: int = _MAX_SHOWN) -> str:
    """Text for a message, without its middle where it is too long."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} … {text[-half:]}"


def first_line(error: BaseException) -> str:
    """The first line of another library's message, without memory addresses; else the error's type."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r" at 0x[0-9a-f]+", "", lines[0])


def replace_control_characters(text: str) -> str:
    """Text without the control characters that a terminal obeys."""
    # escape sequences in a file's name could rewrite what is on the screen
    return "".join(
        character if character.isprintable() or character == "\n" else "�" for character in text
    )


def as_pair(value: int | Sequence[int], *, name: str) -> tuple[int, int]:
    """(height, width) from one number or two.

    Args:
        value: positive, in pixels.
        name: the argument's, for the message.

    Raises:
        ValueError: it is neither, or too large.
    """
    pair: tuple[int, ...] = ()
    if isinstance(value, int):
        pair = (value, value)
    elif isinstance(value, list | tuple):
        pair = tuple(value)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(
            f"{name} {shorten(str(value))} is neither a positive number nor two of them "
            "(height, width)"
        )
    if max(pair) > MAX_SIDE:
        raise ValueError(f"{name} {shorten(str(value))} is more than {MAX_SIDE:,} pixels a side")
    height, width = pair
    return height, width


def resolve_image_sizes(
    image_sizes: Sequence[tuple[float, TrainSize]] | None,
    *,
    image_size: int | Sequence[int],
    patch_size: tuple[int, int],
) -> tuple[tuple[float, tuple[int, int]], ...]:
    """`train.image_sizes` in pixels.

    Args:
        image_sizes: (part of the run, 0 to 1, up to which the size holds; the size); None for none.
        image_size: `data.image_size`, of which fractions are rounded to whole patches.
        patch_size: height and width of a patch.

    Raises:
        ValueError: a size is not a multiple of the patch; the message names its key.
    """
    full_size = as_pair(image_size, name="data.image_size")
    _check_patches("data.image_size", full_size, patch_size)

    # 1 is the full size, not one pixel
    resolved = []
    for until, size in image_sizes or ():
        if isinstance(size, int | float) and 0 < size <= 1:
            height, width = (
                max(round(size * side / patch_side), 1) * patch_side
                for side, patch_side in zip(full_size, patch_size, strict=True)
            )
            resolved.append((until, (height, width)))
        elif isinstance(size, float):
            raise ValueError(
                f"train.image_sizes {size} is neither a fraction of data.image_size, up to 1, nor "
                "whole pixels; such as [[0.6, 0.75], [1, 1]]"
            )
        else:
            pair = as_pair(size, name="train.image_sizes")
            _check_patches("train.image_sizes", pair, patch_size)
            resolved.append((until, pair))
    return tuple(resolved)


def _check_patches(name: str, size: tuple[int, int], patch_size: tuple[int, int]) -> None:
    for side, patch_side in zip(size, patch_size, strict=True):
        # the nearest multiples below and above; 0 is none
        lower = side // patch_side * patch_side
        suggestions = [str(multiple) for multiple in (lower, lower + patch_side) if multiple]
        hint = f"; try {' or '.join(suggestions)}"
        check_multiple(name, side, "model.patch_size", patch_side, hint)


def check_multiple(name: str, value: int, unit_name: str, unit: int, hint: str = "") -> None:
    """Raise ValueError where a value is not a multiple of another."""
    if value % unit:
        raise ValueError(f"{name} {value} is not a multiple of {unit_name} {unit}{hint}")


def check_choice(value: str, known: Collection[str], *, name: str) -> None:
    """Raise ValueError where a value is not one of the known ones, naming them."""
    if value not in known:
        raise ValueError(
            f"unknown {name} {shorten(value)!r}; known: {shorten(', '.join(sorted(known)))}"
        )
