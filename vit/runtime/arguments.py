"""Check arguments, and write text for messages about them."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin
from unicodedata import category

Precision = Literal["float32", "bfloat16", "float16"]
# Pixels of both sides, or (height, width).
Size = int | Sequence[int]
MAX_SIDE = 2**14
# Text that replaces a token.
HIDDEN = "***"
# Parts of the names of address parameters whose values are secret.
_SECRET = "token|sig|key|secret|passw|auth|credential|policy"

Function = TypeVar("Function", bound=Callable[..., Any])


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


def hide_tokens(text: str) -> str:
    """Return text with "***" for the passwords and tokens of addresses: user:password@ before the
    host, and the values of parameters such as token, signature, X-Amz-Credential or sig."""
    text = re.sub(r"(\w://)[^/\s@'\"]*@", rf"\1{HIDDEN}@", text)
    # names of parameters are short; without a bound, the time grows with the square of the text
    name = rf"[\w.-]{{0,99}}(?:{_SECRET})[\w.-]{{0,99}}"
    return re.sub(rf"(?i)([?&;]{name}=)[^&;\s'\"<>)]+", rf"\1{HIDDEN}", text)


def is_control_character(character: str) -> bool:
    """Return true for a character that a terminal obeys or that changes the order of others.

    These are control characters, line separators and Unicode's format characters, but for newlines
    and the joiners of emoji and of Persian.
    """
    is_control = category(character) in ("Cc", "Cf", "Zl", "Zp")
    return is_control and character not in "\n\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"


def replace_control_characters(text: str, *, keep_bytes: bool = False) -> str:
    """Return text for a terminal: with � for control characters and, unless `keep_bytes`, for bytes
    that aren't UTF-8."""
    # Escape sequences in a file's name could change text that is already on the screen.
    if text.isprintable():
        return text
    shown = []
    for character in text:
        is_byte = category(character) == "Cs" and not keep_bytes
        shown.append("�" if is_byte or is_control_character(character) else character)
    return "".join(shown)


def as_pair(value: int | Sequence[int], *, name: str) -> tuple[int, int]:
    """Return (height, width) from one number or two.

    Args:
        value: Positive pixels.
        name: Name of the argument, for the message.

    Raises:
        ValueError: The value is neither, or too large.
    """
    match (value, value) if isinstance(value, int) else value:
        case int(height), int(width) if height > 0 and width > 0:
            pass
        case _:
            expected = "a positive number nor two of them (height, width)"
            raise ValueError(f"{name} {shorten(str(value))} is neither {expected}")
    if max(height, width) > MAX_SIDE:
        raise ValueError(f"{name} {shorten(str(value))} is more than {MAX_SIDE:,} pixels a side")
    return height, width


def resolve_image_sizes(
    image_sizes: Sequence[tuple[float, float]] | None,
    *,
    image_size: int | Sequence[int],
    patch_size: tuple[int, int],
) -> tuple[tuple[float, tuple[int, int]], ...]:
    """Return `train.image_sizes` in pixels, rounded to whole patches.

    Args:
        image_sizes: Pairs (end, scale): until `end`, a fraction of the run, the sides are scale ×
            `data.image_size`. None: one size.
        image_size: `data.image_size`.
        patch_size: Height and width of a patch, in pixels.

    Raises:
        ValueError: `data.image_size` is not a multiple of the patch size.
    """
    sides = list(zip(as_pair(image_size, name="data.image_size"), patch_size, strict=True))
    for side, patch_side in sides:
        # The nearest multiples below and above; 0 is no size.
        lower = side // patch_side * patch_side
        suggestions = [str(multiple) for multiple in (lower, lower + patch_side) if multiple]
        hint = f"; try {' or '.join(suggestions)}"
        check_multiple("data.image_size", side, "model.patch_size", patch_side, hint)

    resolved = []
    for until, scale in image_sizes or ():
        height, width = (max(round(scale * side / patch), 1) * patch for side, patch in sides)
        resolved.append((until, (height, width)))
    return tuple(resolved)


def check_multiple(name: str, value: int, unit_name: str, unit: int, hint: str = "") -> None:
    """Raise ValueError if a value is not a multiple of another."""
    if value % unit:
        raise ValueError(f"{name} {value} is not a multiple of {unit_name} {unit}{hint}")


def as_tuple(values: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple. Raises ValueError for anything else."""
    if isinstance(values, str):
        return (values,)
    if not isinstance(values, Iterable) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{shorten(repr(values))} is neither a name nor a list of names")
    return tuple(values)


def describe_kind(value: object) -> str:
    """Return a description of a value, for a message about its type."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if kind[0] in "aeiouAEIOU":
        return f"an {kind}"
    return f"a {kind}"


def check_kind(value: object, kinds: type | tuple[type, ...], *, name: str, expected: str) -> None:
    """Raise ValueError if an argument is not of the types; `expected` describes right values."""
    if not isinstance(value, kinds):
        raise ValueError(f"{name} is {describe_kind(value)}, not {expected}")


def check_choice(value: str, known: Collection[str], *, name: str) -> None:
    """Raise ValueError that lists the known values if a value is not among them."""
    if value not in known:
        raise ValueError(
            f"unknown {name} {shorten(value)!r}; known: {shorten(', '.join(sorted(known)))}"
        )


def check_arguments(**bounds: tuple[float | None, float | None]) -> Callable[[Function], Function]:
    """Decorate a public function, so that its keyword arguments are checked before it runs.

    Numbers, texts, paths, literals and functions are checked by their annotations. A text that is a
    number is converted. The function itself checks arguments of other types.

    Args:
        bounds: Smallest and largest value of a parameter; None for no bound.

    Raises:
        ValueError: An argument of a call has a wrong type or is outside its bounds.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            kinds = _list_plain_kinds(function)
            for name in kinds.keys() & kwargs.keys():
                if kinds[name] == str | Sequence[str]:
                    as_tuple(kwargs[name])
                    continue
                value = kwargs[name] = check_value(name, kwargs[name], kinds[name])
                minimum, maximum = bounds.get(name, (None, None))
                if value is not None and minimum is not None and value < minimum:
                    raise ValueError(f"{name} {value} must be at least {minimum}")
                if value is not None and maximum is not None and value > maximum:
                    raise ValueError(f"{name} {value} must be at most {maximum}")
            return function(*args, **kwargs)

        return cast(Function, checked)

    return decorate


@lru_cache
def _list_plain_kinds(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the types of the keyword-only parameters whose values pydantic can check."""
    return {
        name: parameter.annotation
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and _is_plain(parameter.annotation)
    }


def _is_plain(kind: Any) -> bool:
    if kind == str | Sequence[str]:
        return True
    if get_origin(kind) in (Literal, Callable) or kind in (str, int, float, bool, Path, NoneType):
        return True
    return get_origin(kind) in (Union, UnionType) and all(map(_is_plain, get_args(kind)))


def check_value(name: str, value: Any, kind: Any) -> Any:
    """Return a value as one of a type. Raises ValueError if it can't be converted."""
    # pydantic takes longer to import than `vit --help` may take
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        kinds = get_args(kind) or (kind,)
        if Path in kinds:
            hint = "; pass images from Python as dataset=…" if name == "data" else ""
            raise ValueError(f"{name} is {describe_kind(value)}, not a path{hint}") from None
        if any(get_origin(part) is Callable for part in kinds):
            raise ValueError(f"{name} is {describe_kind(value)}, not a function") from None
        # one for each type of a union
        messages = [item["msg"] for item in error.errors()]
        problem = " or ".join(message[:1].lower() + message[1:] for message in messages)
        raise ValueError(f"{name} {shorten(repr(value))}: {problem}") from None
