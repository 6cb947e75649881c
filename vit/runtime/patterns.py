"""Regular expressions of users and files: checked at once, and searched within a limit of time."""

import re
from collections.abc import Iterator, Sequence

from vit.runtime.arguments import shorten

# Longest expression in characters, and the limit of a search in one text.
_MAX_CHARACTERS = 10_000
_SECONDS = 0.5


def check_pattern(pattern: str, *, name: str) -> None:
    """Check a regular expression that must have one group.

    Args:
        pattern: The expression.
        name: Name of the option, for messages.

    Raises:
        ValueError: It is no regular expression, is too long, or has another number of groups.
    """
    origin = f"{name} {shorten(repr(pattern))}"
    if len(pattern) > _MAX_CHARACTERS:
        raise ValueError(f"{origin} is longer than {_MAX_CHARACTERS:,} characters; shorten it")
    try:
        num_groups = re.compile(pattern).groups
    # Thousands of brackets or repetitions end in the other errors.
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"{origin} is not a regular expression: {error}") from None
    if num_groups != 1:
        raise ValueError(
            f"{origin} has {num_groups} groups in brackets; give it one, such as '(site\\d+)'"
        )


def search_group(pattern: str, texts: Sequence[str], *, name: str) -> Iterator[str | None]:
    """Yield what the expression's group matches in each text; None where it doesn't match.

    Args:
        pattern: The expression.
        texts: Texts to search.
        name: Name of the option, for messages.

    Raises:
        ValueError: See `check_pattern`; or the search takes too long.
    """
    # not needed by most commands
    import regex

    check_pattern(pattern, name=name)
    expression = regex.compile(pattern)
    for text in texts:
        try:
            match = expression.search(text, timeout=_SECONDS)
        except TimeoutError:
            raise ValueError(
                f"{name} {shorten(repr(pattern))} takes more than {_SECONDS:g} s to search"
                f" {shorten(text)!r}; don't repeat what is itself repeated, as (a+)+ does"
            ) from None
        yield match[1] if match else None
