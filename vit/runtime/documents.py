"""YAML, JSON and tables that anyone may have written: read within bounds, checked by a schema.

Whatever is wrong with a text becomes one ValueError that names where it is from.
"""

import csv
import json
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from vit.runtime.arguments import shorten
from vit.runtime.files import open_regular, read_text

MOST_CHARACTERS = 2**20  # of a YAML text: its parser needs 10 s for so many
_DEPTH = 20  # lists in lists

Schema = TypeVar("Schema", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Plain values only: aliases multiply and tags call constructors, and no configuration needs either."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse("anchors and aliases (&name, *name) are not read; write the values out", event)
        if getattr(event, "tag", None) is not None:
            self._refuse(f"the tag {event.tag} is not read; write the value alone", event)
        self.depth += 1
        if self.depth > _DEPTH:
            self._refuse(f"more than {_DEPTH} levels of lists and sections", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                self._refuse(f"the key {shorten(key.value)} is there twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def _refuse(self, problem: str, place: Any) -> None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def parse_yaml(text: str, *, origin: str) -> Any:
    """Plain values: no anchors, aliases or tags, no key twice, at most 20 levels and 2²⁰ characters."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{origin} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        text = " ".join(filter(None, (error.context, error.problem)))
        raise ValueError(f"{origin} is not valid YAML: {shorten(text)}{line}") from error
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # such as 2001-13-45 or an int of 5,000 digits
        raise ValueError(f"{origin} is not valid YAML: {shorten(str(error))}") from error


def parse_json(text: str, *, origin: str) -> Any:
    """Any JSON value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not valid JSON: {shorten(str(error))}") from error


def check_schema(schema: type[Schema], values: Any, *, origin: str) -> Schema:
    """`values` as an object of `schema`; the error names the first key that is wrong."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{origin}: {explain_error(error.errors()[0])}") from None


def explain_error(error: Any) -> str:
    """One pydantic error as a sentence that names the key and the value."""
    key = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("function-", "literal[")))
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"{shorten(key)}: {message}, not {shorten(repr(error['input']))}" if key else message


def read_json(path: Path) -> Any:
    """The value in a JSON file."""
    return parse_json(read_text(path), origin=str(path))


def read_table(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Of each row of a CSV file its place, "FILE line N", and its fields."""
    with open_regular(path, encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            for row in reader:
                yield f"{path} line {reader.line_num}", row
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} line {reader.line_num} is no row of a table: {error}") from error
