"""Read YAML, JSON and tables. Every mistake in one becomes a ValueError that names the file."""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from vit.runtime.arguments import shorten
from vit.runtime.files import read_text

# Beginning of a cell that spreadsheets take for a formula (OWASP, "CSV injection"), also after
# apostrophes.
_FORMULA = "('*[=+\\-@\t\r\n])"


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the plain values in a YAML file, by name."""
    text = read_text(path)
    try:
        values = yaml.safe_load(text) or {}
    except Exception as error:
        # Values such as 2001-13-45, nested lists and wrong tags end in errors of any type.
        problem = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML: {shorten(problem)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not names with values")
    return values


def parse_json(text: str, *, origin: str) -> Any:
    """Parse a JSON value. `origin` names it in the message of an error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not valid JSON: {shorten(str(error))}") from error


def read_json(path: Path) -> Any:
    """Return the value in a JSON file."""
    return parse_json(read_text(path), origin=str(path))


def escape_formula(text: str) -> str:
    """Return text as a cell of a CSV table that a spreadsheet doesn't take for a formula: with an
    apostrophe before =, +, -, @, tabs and line breaks, except in numbers. `read_rows` removes it.
    """
    try:
        float(text)
    except ValueError:
        return re.sub(f"^{_FORMULA}", r"'\1", text)
    return text


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place of each row of a CSV file, "FILE line N", and its fields by the names in the
    first line, without the apostrophes of `escape_formula`. Raises ValueError for a wrong row."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            header = next(reader, [])
            for row in filter(None, reader):
                fields = [re.sub(f"^'{_FORMULA}", r"\1", text) for text in row]
                yield f"{path} line {reader.line_num}", dict(zip(header, fields, strict=True))
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{path} line {reader.line_num}: {error}") from error
