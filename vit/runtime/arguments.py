"""Check values, and write text for messages about them."""

import re
from collections.abc import Collection, Sequence
from typing import Literal
from unicodedata import category

Precision = Literal["float32", "bfloat16", "float16"]
# Pixels of both sides, or (height, width).
Size = int | Sequence[int]
MAX_SIDE = 2**14


def shorten(text: str, max_characters: int = 200) -> str:
    """Return text for a message, without its middle if it is too long."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} … {text[-half:]}"


def first_line(error: BaseException) -> str:
    """Return a library's message: its first line, without memory addresses, or the error's type."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r" at 0x[0-9a-f]+", "", lines[0])


def replace_control_characters(text: str, *, keep_bytes: bool = False) -> str:
    """Return text for a terminal: with � for each character that it obeys or that changes the
    order of others and, unless `keep_bytes`, for bytes that aren't UTF-8."""
    # Escape sequences in a file's name could change text that is already on the screen.
    if text.isprintable():
        return text
    # control and format characters, and separators of lines
    replaced = {"Cc", "Cf", "Zl", "Zp"}
    if not keep_bytes:
        replaced.add("Cs")
    # Emoji and Persian need the joiners.
    kept = "\n\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
    unsafe = {each for each in set(text) if category(each) in replaced and each not in kept}
    return text.translate(dict.fromkeys(map(ord, unsafe), "�"))


def as_pair(value: int | Sequence[int], *, name: str) -> tuple[int, int]:
    """Return (height, width) from one number of pixels or two. Raises ValueError that names the
    argument if they are neither, or not from 1 to 16,384."""
    match (value, value) if isinstance(value, int) else value:
        case int(height), int(width) if min(height, width) > 0 and max(height, width) <= MAX_SIDE:
            return height, width
    raise ValueError(
        f"{name} {shorten(str(value))} is neither a number from 1 to {MAX_SIDE:,} nor two of them"
        " (height, width)"
    )


def check_minimum(minimum: float, **values: float | None) -> None:
    """Raise ValueError that names an argument whose value is below the minimum; None isn't."""
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name} {value} must be at least {minimum}")


def as_tuple(values: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple."""
    if isinstance(values, str):
        return (values,)
    return tuple(values)


def check_kind(value: object, kinds: type | tuple[type, ...], *, name: str, expected: str) -> None:
    """Raise ValueError if an argument is not of the types; `expected` describes right values."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is of the type {type(value).__name__}, not {expected}")


def check_choice(value: str, known: Collection[str], *, name: str) -> None:
    """Raise ValueError that lists the known values if a value is not among them."""
    if value not in known:
        names = shorten(", ".join(sorted(known)) or "none")
        raise ValueError(f"unknown {name} {shorten(value)!r}; known: {names}")
