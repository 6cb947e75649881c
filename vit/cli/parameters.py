"""From a function with an options record of `vit.options` to a command of Typer.

What stands before the `*` of the function is an argument, what follows it an option. The help of
each is its text under `Args:`, in the docstring of the function or of the record.
"""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from vit.options import Option
from vit.runtime.arguments import shorten
from vit.runtime.files import expand_home

_RARE = "option"  # the parameter of --option NAME=VALUE


class _Parameter(NamedTuple):
    name: str
    kind: Any  # its type
    option: Option
    default: Any
    help: str


def build_command(function: Callable[..., None]) -> Callable[..., None]:
    """A function as Typer takes it, which reads its signature: the fields of its parameter
    `options`, a record, are parameters of their own."""
    hints = get_type_hints(function, include_extras=True)
    help_texts = _read_help(function)
    record = hints.get("options")
    record_fields = _list_fields(record) if record else []
    own_parameters = inspect.signature(function).parameters

    built = []
    for name, parameter in own_parameters.items():
        if name == "options":
            built += _build_options(record_fields)
            continue
        kind, option = _split_hint(hints[name])
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            built.append(
                _build_option(_Parameter(name, kind, option, parameter.default, help_texts[name]))
            )
        else:
            info = typer.Argument(help=help_texts[name])
            built.append(parameter.replace(annotation=Annotated[kind, info]))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        arguments = {name: values.pop(name) for name in own_parameters if name != "options"}
        arguments = {
            name: expand_home(value) if isinstance(value, Path) else value
            for name, value in arguments.items()
        }
        if record:
            arguments["options"] = _read_record(record, record_fields, values)
        function(**arguments)

    command.__doc__ = (function.__doc__ or "").partition("Args:\n")[0]
    command.__signature__ = inspect.Signature(built)  # type: ignore[attr-defined]  # PEP 362
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in built}
    return command


def _read_help(documented: Any) -> dict[str, str]:
    """Name → text of the section `Args:` of a docstring."""
    entries = re.findall(
        r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(documented) or "", re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in entries}


def _split_hint(hint: Any) -> tuple[Any, Option]:
    if get_origin(hint) is Annotated:
        kind, option = get_args(hint)
        return kind, option
    return hint, Option()


def _list_fields(record: type[Any]) -> list[_Parameter]:
    """The fields of a record and of those within it, which are rare."""
    help_texts: dict[str, str] = {}
    for base in record.__mro__[:-1]:
        help_texts |= _read_help(base)
    hints = get_type_hints(record, include_extras=True)
    listed = []
    for field in fields(record):
        kind, option = _split_hint(hints[field.name])
        if is_dataclass(kind):
            inner = _list_fields(kind)  # type: ignore[arg-type]  # it is a class
            listed += [item._replace(option=item.option._replace(is_rare=True)) for item in inner]
        else:
            help_text = help_texts[field.name]
            listed.append(_Parameter(field.name, kind, option, field.default, help_text))
    return listed


def _build_options(record_fields: list[_Parameter]) -> list[inspect.Parameter]:
    """The options of a record: one for each field, and one that its rare fields share."""
    options = [_build_option(item) for item in record_fields if not item.option.is_rare]
    rare = [f"{item.name} ({item.help})" for item in record_fields if item.option.is_rare]
    if rare:
        text = f"rarely needed; may be repeated: {'; '.join(rare)}"
        shared = _Parameter(_RARE, list[str] | None, Option(), None, text)
        options.append(_build_option(shared, metavar="NAME=VALUE"))
    return options


def _build_option(parameter: _Parameter, metavar: str | None = None) -> inspect.Parameter:
    """An option as Typer takes it: a tuple of names is one text with commas in it."""
    name, kind, option, default, help_text = parameter
    flags = [option.flag or f"--{name.replace('_', '-')}"]
    if name == "output":
        flags.append("-o")
    if get_origin(kind) is tuple:
        default = ",".join(default) or None
    # Typer knows no tuples of any length, and no unions but with None
    if str in get_args(kind):
        kind = str | None
    info = typer.Option(*flags, help=help_text, min=option.min, max=option.max, metavar=metavar)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, info])


def _read_record(record: type[Any], record_fields: list[_Parameter], values: dict[str, Any]) -> Any:
    """The record of what Typer read. Raises ValueError for an unknown --option, or a value of
    another type."""
    # pydantic takes longer to import than `vit --help` may take
    from pydantic import TypeAdapter, ValidationError

    for item in record_fields:
        if get_origin(item.kind) is tuple:
            names = values[item.name] or ""
            values[item.name] = tuple(name.strip() for name in names.split(",") if name)

    rare = {item.name: item for item in record_fields if item.option.is_rare}
    for text in values.pop(_RARE, None) or []:
        name, equals, value = text.partition("=")
        if not equals or name not in rare:
            raise ValueError(
                f"--option {shorten(text)!r} is not NAME=VALUE with one of {', '.join(rare)}"
            )
        values[name] = value

    # a record within it takes those values that are its fields
    for field in fields(record):
        if field.name not in values and field.name not in rare:
            values[field.name] = values.copy()
    try:
        return TypeAdapter(record).validate_python(values)
    except ValidationError as error:
        # Typer has checked all others
        name = next(part for part in error.errors()[0]["loc"] if part in rare)
        problems = [item["msg"].lower() for item in error.errors() if name in item["loc"]]
        raise ValueError(f"{name} {shorten(values[name])!r}: {' or '.join(problems)}") from None
