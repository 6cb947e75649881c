"""Regular expressions of users: checked at once, and searched within a limit of time."""

from collections.abc import Iterator, Sequence
from typing import Any

from vit.runtime.arguments import shorten

# Limit of a search in one text.
_SECONDS = 0.5


def check_pattern(pattern: str, *, name: str) -> Any:
    """Return a regular expression that must have one group, compiled.

    Args:
        pattern: The expression.
        name: Name of the option, for messages.

    Raises:
        ValueError: It is no regular expression, or has another number of groups.
    """
    # not needed by most commands
    import regex

    origin = f"{name} {shorten(repr(pattern))}"
    try:
        expression = regex.compile(pattern)
    # Thousands of brackets or repetitions end in the other errors.
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"{origin} is not a regular expression: {error}") from None
    if expression.groups != 1:
        raise ValueError(
            f"{origin} has {expression.groups} groups in brackets; give it one, such as"
            " '(site\\d+)'"
        )
    return expression


def search_group(pattern: str, texts: Sequence[str], *, name: str) -> Iterator[str | None]:
    """Yield what the expression's group matches in each text; None where it doesn't match.

    Raises:
        ValueError: See `check_pattern`; or the search in a text takes too long.
    """
    expression = check_pattern(pattern, name=name)
    for text in texts:
        try:
            match = expression.search(text, timeout=_SECONDS)
        except TimeoutError:
            raise ValueError(
                f"{name} {shorten(repr(pattern))} takes more than {_SECONDS:g} s to search"
                f" {shorten(text)!r}; don't repeat what is itself repeated, as (a+)+ does"
            ) from None
        yield match[1] if match else None
