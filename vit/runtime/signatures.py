"""Read a function's signature and the text of its `Args:` from its source, without importing it.

The functions of `vit.api` import torch, which takes seconds; the help of their commands does
without.
"""

import ast
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

_ROOT = Path(__file__).parents[2]
# The default of a parameter that has none.
REQUIRED = object()
# Type of a parameter that takes one name or several.
Names = tuple[str, ...]
# Smallest and largest value; None for no bound.
Bounds = tuple[float | None, float | None]
_KINDS = {"int": int, "float": float, "bool": bool, "Path": Path}

Function = TypeVar("Function", bound=Callable[..., Any])


class Parameter(NamedTuple):
    """A parameter of a function.

    Attributes:
        kind: Type that a text on the command line is read as: str, int, float, bool, Path, a
            Literal, list[str] or `Names`. Others, such as a model, are named by a text.
        default: Its default, or `REQUIRED`.
        is_keyword: True if it follows the `*`.
        help: First sentence of its entry under `Args:`, and the default from a sentence "None: …".
        bounds: Smallest and largest value, given to `check_arguments`.
    """

    name: str
    kind: Any
    default: Any
    is_keyword: bool
    help: str
    bounds: Bounds


def check_arguments(**bounds: Bounds) -> Callable[[Function], Function]:
    """Decorate a public function, so that its numbers are checked before it runs.

    Args:
        bounds: Smallest and largest value of a keyword argument; None for no bound.

    Raises:
        ValueError: An argument of a call is outside its bounds.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name, (minimum, maximum) in bounds.items():
                value = kwargs.get(name)
                if value is None:
                    continue
                if minimum is not None and value < minimum:
                    raise ValueError(f"{name} {value} must be at least {minimum}")
                if maximum is not None and value > maximum:
                    raise ValueError(f"{name} {value} must be at most {maximum}")
            return function(*args, **kwargs)

        return cast(Function, checked)

    return decorate


@lru_cache
def list_public_names() -> Mapping[str, str]:
    """Return the names that `vit.api` imports, each with the module that defines it."""
    return {
        alias.name: node.module or ""
        for node in _parse("vit.api").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@lru_cache
def read_signature(module: str, name: str) -> Mapping[str, Parameter]:
    """Return the parameters of a function or method of a module, by name, in order."""
    function = _find_function(module, name)
    arguments = function.args
    positional = arguments.args
    # The list of defaults is that of the last positional parameters.
    missing = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
    bounds = _read_bounds(function)
    parameters = {}
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        text = _find_text(function, argument.arg)
        sentence = re.split(r"(?<=[.?])\s", text)[0]
        if none := re.search(r"\bNone: (.+?)(?:\.\s|\.?$)", text):
            sentence += f" Default: {none[1]}."
        parameters[argument.arg] = Parameter(
            argument.arg,
            kind=_read_kind(argument.annotation),
            default=REQUIRED if default is None else ast.literal_eval(default),
            is_keyword=argument in arguments.kwonlyargs,
            help=sentence,
            bounds=bounds.get(argument.arg, (None, None)),
        )
    return parameters


def _find_function(module: str, name: str) -> ast.FunctionDef:
    found: Any = _parse(module)
    for part in name.split("."):
        found = next(node for node in found.body if getattr(node, "name", "") == part)
    return cast(ast.FunctionDef, found)


@lru_cache
def _parse(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _find_text(function: ast.FunctionDef, name: str) -> str:
    """Return the entry of a parameter under `Args:`, or the one of another function that it refers
    to, on one line."""
    entry = re.search(
        rf"^ {{4}}{name}: (.+(?:\n {{8}}.+)*)", ast.get_docstring(function) or "", re.MULTILINE
    )
    text = " ".join(entry[1].split()) if entry else ""
    reference = re.match(r"See `vit\.(\w+)`", text)
    if not reference:
        return text
    other = reference[1]
    return _find_text(_find_function(list_public_names()[other], other), name)


def _read_bounds(function: ast.FunctionDef) -> dict[str, Bounds]:
    """Return the keywords of the decorator `check_arguments`."""
    return {
        str(keyword.arg): ast.literal_eval(keyword.value)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "check_arguments"
        for keyword in decorator.keywords
    }


def _read_kind(annotation: ast.expr | None) -> Any:
    """Return the type that a text on the command line is read as."""
    kind = ast.unparse(annotation).removesuffix(" | None") if annotation else ""
    if kind == "str | Sequence[str]":
        return Names
    if kind.startswith("Literal"):
        choices = ast.literal_eval(kind.removeprefix("Literal"))
        return cast(Any, Literal)[tuple(choices)]
    if kind.startswith(("list[", "Sequence[")):
        return list[str]
    return _KINDS.get(kind, str)
