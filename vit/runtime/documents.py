"""Read YAML, JSON and tables.

Every mistake in a text becomes one ValueError that names where the text comes from.
"""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vit.runtime.arguments import shorten
from vit.runtime.files import read_text

# Beginnings of a cell that spreadsheets take for a formula, with apostrophes before it or not (OWASP,
# "CSV injection"), and of one that `escape_formula` has changed.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")
_ESCAPED = re.compile(r"'+[=+\-@\t\r\n]")


def parse_yaml(text: str, *, origin: str) -> Any:
    """Parse plain values. Raises ValueError whose message begins with `origin`."""
    try:
        return yaml.safe_load(text)
    # The others come from values such as 2001-13-45, nested lists and wrong tags.
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError, AttributeError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{origin} is not valid YAML: {shorten(problem)}") from error


def parse_json(text: str, *, origin: str) -> Any:
    """Parse a JSON value. Raises ValueError whose message begins with `origin`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not valid JSON: {shorten(str(error))}") from error


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_text(path), origin=str(path))


def explain_error(error: Any) -> str:
    """Return one of pydantic's errors as a sentence that names the key and the value."""
    # pydantic adds the names of its validators to the keys.
    parts = [str(part) for part in error["loc"]]
    key = ".".join(part for part in parts if not part.startswith(("function-", "literal[")))
    message: str = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if not key:
        return message
    return f"{shorten(key)}: {message}, not {shorten(repr(error['input']))}"


def escape_formula(text: str) -> str:
    """Return text as a cell of a CSV table that a spreadsheet doesn't take for a formula.

    An apostrophe is put before =, +, -, @, tabs and line breaks, except in numbers. `read_rows`
    removes it.
    """
    if _FORMULA.match(text) and not _is_number(text):
        return f"'{text}"
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place of each row of a CSV file, "FILE line N", and its fields by the names in the
    first line, without the apostrophes of `escape_formula`. Raises ValueError for a wrong row."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            for row in reader:
                place = f"{path} line {reader.line_num}"
                if len(row) != len(header):
                    raise ValueError(f"{place} has {len(row)} fields instead of {len(header)}")
                fields = (text[1:] if _ESCAPED.match(text) else text for text in row)
                yield place, dict(zip(header, fields, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} line {reader.line_num} is not a row of a CSV table: {error}"
            ) from error
