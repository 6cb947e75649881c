"""Regular expressions of users."""

import re
from collections.abc import Sequence

from vit.runtime.arguments import shorten


def search_group(pattern: str, texts: Sequence[str], *, name: str) -> list[str | None]:
    """Return what the one group of a regular expression matches in each text; None where it doesn't
    match. Raises ValueError that names the option for any other expression."""
    try:
        expression = re.compile(pattern)
        problem = f"it has {expression.groups} groups"
    # Thousands of brackets or repetitions end in the other errors.
    except (re.error, RecursionError, OverflowError) as error:
        expression, problem = None, str(error)
    if expression is None or expression.groups != 1:
        raise ValueError(
            f"{name} {shorten(repr(pattern))} is not a regular expression with one group in"
            f" brackets, such as '(site\\d+)': {problem}"
        )
    matches = map(expression.search, texts)
    return [match and match[1] for match in matches]
