"""Checks of arguments, and text for messages about them."""

import re
from collections.abc import Collection, Iterable, Sequence
from types import FunctionType
from typing import Literal

Precision = Literal["float32", "bfloat16", "float16"]
# pixels: of both sides, or (height, width)
Size = int | Sequence[int]
MAX_SIDE = 2**14
# in the place of a token
HIDDEN = "***"
# in the name of a parameter whose value opens something
_SECRET = "token|sig|key|secret|passw|auth|credential|policy"


def shorten(text: str, max_characters: int = 200) -> str:
    """Text for a message, without its middle where it is too long."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]} … {text[-half:]}"


def first_line(error: BaseException) -> str:
    """The first line of another library's message, without memory addresses; else the error's type."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r" at 0x[0-9a-f]+", "", lines[0])


def hide_tokens(text: str) -> str:
    """Text in which the passwords and tokens of addresses are "***": user:password@ before the
    host, and values of parameters such as token, signature, X-Amz-Credential or sig."""
    text = re.sub(r"(\w://)[^/\s@'\"]*@", rf"\1{HIDDEN}@", text)
    return re.sub(rf"(?i)([?&;][\w.-]*(?:{_SECRET})[\w.-]*=)[^&;\s'\"<>)]+", rf"\1{HIDDEN}", text)


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
        expected = "a positive number nor two of them (height, width)"
        raise ValueError(f"{name} {shorten(str(value))} is neither {expected}")
    if max(pair) > MAX_SIDE:
        raise ValueError(f"{name} {shorten(str(value))} is more than {MAX_SIDE:,} pixels a side")
    height, width = pair
    return height, width


def resolve_image_sizes(
    image_sizes: Sequence[tuple[float, float]] | None,
    *,
    image_size: int | Sequence[int],
    patch_size: tuple[int, int],
) -> tuple[tuple[float, tuple[int, int]], ...]:
    """`train.image_sizes` in pixels, rounded to whole patches.

    Args:
        image_sizes: (part of the run, 0 to 1, up to which the size holds; the size as a fraction of
            `data.image_size`); None for none.
        image_size: `data.image_size`.
        patch_size: height and width of a patch.

    Raises:
        ValueError: `data.image_size` is not a multiple of the patch.
    """
    full_size = as_pair(image_size, name="data.image_size")
    for side, patch_side in zip(full_size, patch_size, strict=True):
        # the nearest multiples below and above; 0 is none
        lower = side // patch_side * patch_side
        suggestions = [str(multiple) for multiple in (lower, lower + patch_side) if multiple]
        hint = f"; try {' or '.join(suggestions)}"
        check_multiple("data.image_size", side, "model.patch_size", patch_side, hint)

    resolved = []
    for until, fraction in image_sizes or ():
        height, width = (
            max(round(fraction * side / patch_side), 1) * patch_side
            for side, patch_side in zip(full_size, patch_size, strict=True)
        )
        resolved.append((until, (height, width)))
    return tuple(resolved)


def check_multiple(name: str, value: int, unit_name: str, unit: int, hint: str = "") -> None:
    """Raise ValueError where a value is not a multiple of another."""
    if value % unit:
        raise ValueError(f"{name} {value} is not a multiple of {unit_name} {unit}{hint}")


def as_tuple(values: str | Sequence[str]) -> tuple[str, ...]:
    """One name, or several. Raises ValueError for what is neither."""
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Iterable) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{shorten(repr(values))} is neither a name nor a list of names")
    return tuple(values)


def describe_kind(value: object) -> str:
    """What a value is, for a message about one of the wrong kind."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    if value is None:
        return "None"
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return f"{article} {kind}"


def check_kind(value: object, kinds: type | tuple[type, ...], *, name: str, expected: str) -> None:
    """Raise ValueError where an argument from Python is of another type.

    Args:
        value: of the argument.
        kinds: types that it may have.
        name: the argument's.
        expected: what it may be, and perhaps what to pass instead.
    """
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is {describe_kind(value)}, not {expected}")


def check_choice(value: str, known: Collection[str], *, name: str) -> None:
    """Raise ValueError where a value is not one of the known ones, naming them."""
    if value not in known:
        raise ValueError(
            f"unknown {name} {shorten(value)!r}; known: {shorten(', '.join(sorted(known)))}"
        )
