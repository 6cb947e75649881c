"""Regular expressions of users."""

import re
from collections.abc import Sequence

from vit.runtime.arguments import shorten


def check_pattern(pattern: str, *, name: str) -> re.Pattern[str]:
    """Return a regular expression that must have one group, compiled.

    Args:
        pattern: The expression.
        name: Name of the option, for messages.

    Raises:
        ValueError: It is no regular expression, or has another number of groups.
    """
    try:
        expression = re.compile(pattern)
        if expression.groups == 1:
            return expression
        problem = f"it has {expression.groups} groups"
    # Thousands of brackets or repetitions end in the other errors.
    except (re.error, RecursionError, OverflowError) as error:
        problem = str(error)
    raise ValueError(
        f"{name} {shorten(repr(pattern))} is not a regular expression with one group in brackets,"
        f" such as '(site\\d+)': {problem}"
    )


def search_group(pattern: str, texts: Sequence[str], *, name: str) -> list[str | None]:
    """Return what the expression's group matches in each text; None where it doesn't match. Raises
    the error of `check_pattern`."""
    expression = check_pattern(pattern, name=name)
    matches = map(expression.search, texts)
    return [match and match[1] for match in matches]
