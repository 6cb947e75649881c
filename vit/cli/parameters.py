"""From a function with an options record of `vit.options` to a command of Typer.

What stands before the `*` of the function is an argument, what follows it an option. The help of
each is its text under `Args:`, in the docstring of the function or of the record.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from vit.options import Option
from vit.runtime.arguments import shorten

_RARE = "option"  # the parameter of --option NAME=VALUE


class _Parameter(NamedTuple):
    name: str
    kind: Any  # its type
    option: Option
    default: Any
    help: str
    is_argument: bool = False


def build_command(function: Callable[..., None]) -> Callable[..., None]:
    """A function as Typer takes it, which reads its signature: the fields of its parameter
    `options`, a record, are parameters of their own."""
    hints = get_type_hints(function, include_extras=True)
    record: Any = hints.get("options")
    record_fields = _list_fields(record) if record else []
    own_parameters = inspect.signature(function).parameters
    help_texts = _read_help(function)

    parameters = []
    for name, parameter in own_parameters.items():
        if name == "options":
            parameters += [item for item in record_fields if not item.option.is_rare]
            # the others share an option
            if rare := [
                f"{item.name} ({item.help})" for item in record_fields if item.option.is_rare
            ]:
                text = f"rarely needed; may be repeated: {'; '.join(rare)}"
                parameters.append(_Parameter(_RARE, list[str] | None, Option(), None, text))
        else:
            is_argument = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            kind, option = _split_hint(hints[name])
            parameters.append(
                _Parameter(name, kind, option, parameter.default, help_texts[name], is_argument)
            )
    built = [_build_parameter(parameter) for parameter in parameters]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        arguments = {name: values.pop(name) for name in own_parameters if name != "options"}
        if record:
            arguments["options"] = _fill(record, _read_values(values, record_fields))
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


def _build_parameter(parameter: _Parameter) -> inspect.Parameter:
    """A parameter as Typer takes it: a tuple of names is one text with commas in it."""
    name, kind, option, default, help_text, is_argument = parameter
    if is_argument:
        info = typer.Argument(help=help_text)
    else:
        flags = [option.flag or f"--{name.replace('_', '-')}"]
        if name == "output":
            flags.append("-o")
        info = typer.Option(*flags, help=help_text, min=option.min, max=option.max)
        if name == _RARE:
            info.metavar = "NAME=VALUE"
        if get_origin(kind) is tuple:
            default = ",".join(default) or None
        # Typer knows no tuples of any length, and no unions but with None
        if str in get_args(kind):
            kind = str | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


def _read_values(values: dict[str, Any], record_fields: list[_Parameter]) -> dict[str, Any]:
    """What Typer read for the fields of a record, as their types. Raises ValueError for an unknown
    --option, or a value of another type."""
    rare_texts = values.pop(_RARE, None) or []
    rare = {item.name: item for item in record_fields if item.option.is_rare}
    for item in record_fields:
        if get_origin(item.kind) is tuple:
            names = values[item.name] or ""
            values[item.name] = tuple(name.strip() for name in names.split(",") if name)
    for text in rare_texts:
        name, equals, value = text.partition("=")
        if not equals or name not in rare:
            raise ValueError(
                f"--option {shorten(text)!r} is not NAME=VALUE with one of {', '.join(rare)}"
            )
        values[name] = _parse(rare[name], value)
    return values


def _parse(parameter: _Parameter, text: str) -> Any:
    # pydantic takes longer to import than `vit --help` may take
    from pydantic import Field, TypeAdapter, ValidationError

    kind: Any = Annotated[parameter.kind, Field(ge=parameter.option.min)]
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        reasons = " or ".join(item["msg"].lower() for item in error.errors())
        raise ValueError(f"{parameter.name} {shorten(text)!r}: {reasons}") from None


def _fill(record: type[Any], values: Mapping[str, Any]) -> Any:
    """The record, and those that are its fields, with the values that are theirs."""
    arguments = {}
    for name, kind in get_type_hints(record).items():
        if is_dataclass(kind):
            arguments[name] = _fill(kind, values)  # type: ignore[arg-type]  # it is a class
        elif name in values:
            arguments[name] = values[name]
    return record(**arguments)
