"""Read a function's signature and the text of its `Args:` from its source, without importing it.

The functions of `vit.api` import torch, which takes seconds; the help of their commands does
without.
"""

import ast
import inspect
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

_ROOT = Path(__file__).parents[2]
# Type of a parameter that takes one name or several.
Names = tuple[str, ...]
_KINDS = {"int": int, "float": float, "bool": bool, "Path": Path, "str | Sequence[str]": Names}


class Parameter(NamedTuple):
    """A parameter of a function.

    Attributes:
        kind: Type that a text on the command line is read as. A model, for example, is a str.
        default: Its default, or `inspect.Parameter.empty`.
        is_keyword: True if it follows the `*`.
        help: First sentence of its entry under `Args:`, and the default after "None:" there.
    """

    name: str
    kind: Any
    default: Any
    is_keyword: bool
    help: str


@lru_cache
def list_public_names() -> Mapping[str, str]:
    """Return the names that `vit.api` imports, each with the module that defines it."""
    return {
        alias.name: node.module or ""
        for node in _parse("vit.api").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def read_signature(module: str, name: str) -> dict[str, Parameter]:
    """Return the parameters of a function of a module by name, in order."""
    function = _find_function(module, name)
    arguments = function.args
    listed = [*arguments.args, *arguments.kwonlyargs]
    given = [*arguments.defaults, *arguments.kw_defaults]
    # the first ones, before the `*`, have none
    defaults = [None] * (len(listed) - len(given)) + given
    parameters = {}
    for argument, default in zip(listed, defaults, strict=True):
        text = _find_text(function, argument.arg)
        sentence = re.split(r"(?<=[.?])\s", text)[0]
        if none := re.search(r"\bNone: (.+?)(?:\.\s|\.?$)", text):
            sentence += f" Default: {none[1]}."
        parameters[argument.arg] = Parameter(
            argument.arg,
            kind=_read_kind(argument.annotation),
            default=inspect.Parameter.empty if default is None else ast.literal_eval(default),
            is_keyword=argument in arguments.kwonlyargs,
            help=sentence,
        )
    return parameters


def _find_function(module: str, name: str) -> ast.FunctionDef:
    found = (node for node in _parse(module).body if getattr(node, "name", "") == name)
    return cast(ast.FunctionDef, next(found))


@lru_cache
def _parse(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _find_text(function: ast.FunctionDef, name: str) -> str:
    """Return the entry of a parameter under `Args:`, or the one of another function that it refers
    to, on one line."""
    docstring = ast.get_docstring(function) or ""
    entry = re.search(rf"^ {{4}}{name}: (.+(?:\n {{8}}.+)*)", docstring, re.MULTILINE)
    text = " ".join(entry[1].split()) if entry else ""
    reference = re.match(r"See `vit\.(\w+)`", text)
    if not reference:
        return text
    other = reference[1]
    return _find_text(_find_function(list_public_names()[other], other), name)


def _read_kind(annotation: ast.expr | None) -> Any:
    """Return the type that a text on the command line is read as."""
    kind = ast.unparse(annotation).removesuffix(" | None") if annotation else ""
    if kind.startswith("Literal"):
        choices = ast.literal_eval(kind.removeprefix("Literal"))
        return cast(Any, Literal)[tuple(choices)]
    if kind.startswith(("list[", "Sequence[")):
        return list[str]
    return _KINDS.get(kind, str)
