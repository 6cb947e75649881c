"""How a command of the command line is made.

The public function's signature and its `Args:` are the only place of an option's name, type, default
and text: `vit.runtime.signatures` reads them from the source, so that `--help` needs no torch.

- A parameter before the `*` is an argument, one after it an option: `batch_size` is --batch-size.
- Its help is the first sentence under `Args:`; a sentence "None: …" says what the default None means;
  "See `vit.evaluate`." takes the text from there.
- `@check_arguments(batch_size=(1, None))` above the function gives the smallest and largest value.
- A required `output` has a default, `choose_output`.
- `str | Sequence[str]` is a list of names with commas; values of other types, such as a model, are given as text.

A command is a module with a `COMMAND` (`vit.runtime.command.Command`), which `vit.cli.main` names on one
line: see vit/analysis/audit/command.py. Its function `run` receives the public function with its options
filled in (`audit()` runs it, `audit.keywords` are the values), then its own parameters, which are read
from its signature in the same way. An own parameter with the name of one of the public function
replaces it: `run` must pass it on. The table in `Command` says
what signatures don't: other flags, shorter texts, what is for Python only, what is rarely needed.
The first sentence of the docstring of `run` is shown in `vit --help`: at most 60 characters.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from vit.model.find_file import MODEL_FILE
from vit.runtime.arguments import check_value, shorten
from vit.runtime.command import Command
from vit.runtime.files import clean_name, expand_home
from vit.runtime.signatures import (
    REQUIRED,
    Names,
    Parameter,
    list_public_names,
    read_signature,
)

# Types as the help shows them.
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", list[str]: "TEXT"}
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
# A hyphen at which Click starts no new line. The help shows a plain one instead.
_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def add_command(app: typer.Typer, command: Command) -> None:
    """Add a command, and its alias, to the command line."""
    builder = CommandBuilder(command)
    run = builder.build()
    rare = [(name, builder.describe(parameter)) for name, parameter in builder.rare.items()]
    # Typer makes the object from a class.
    sections = staticmethod(command.sections)
    attributes = {"rare": rare, "sections": sections, "old_flags": command.old_flags}
    kind = type("VitCommand", (VitCommand,), attributes)
    title = (inspect.getdoc(command.run) or "").partition("\n")[0]
    app.command(command.run.__name__, cls=kind, short_help=title)(run)
    if command.alias:
        app.command(command.alias, cls=kind, hidden=True)(run)


class VitCommand(TyperCommand):
    """A command whose help doesn't break lines within names.

    Attributes:
        rare: Name and text of each rare option.
        old_flags: See `Command`.
        sections: See `Command`.
    """

    rare: Sequence[tuple[str, str]] = ()
    old_flags: Mapping[str, str] = {}
    sections: Callable[[], Mapping[str, Sequence[tuple[str, str]]]]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        def rename(argument: str) -> str:
            flag, equals, value = argument.partition("=")
            return self.old_flags.get(flag, flag) + equals + value

        return super().parse_args(ctx, [rename(argument) for argument in args])

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(_keep_hyphens(self.help or ""))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments: list[tuple[str, str]] = []
        options: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            names, text = parameter.get_help_record(ctx) or ("", "")
            if parameter.param_type_name == "argument":
                # without Typer's name of the type
                arguments.append((names.partition(" <")[0], text))
            else:
                options.append((names, text))
        for title, rows in (
            ("Arguments", arguments),
            ("Options", options),
            ("Rare options, set by --option NAME=VALUE", self.rare),
            *self.sections().items(),
        ):
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name, _keep_hyphens(text)) for name, text in rows])

    def get_help(self, ctx: Any) -> str:
        # Typer puts the name of an argument into braces.
        text = re.sub(r"\{(\w+)\}", r"\1", super().get_help(ctx))
        return text.replace(_HYPHEN, "-")


class CommandBuilder:
    """From a `Command` to a function as Typer takes it.

    Attributes:
        own: Parameters of the command's function `run`.
        passed: Parameters of the public function that are options or arguments.
        rare: Parameters of the public function that are set by --option NAME=VALUE.
    """

    def __init__(self, command: Command) -> None:
        self.command = command
        self.own = read_signature(command.run.__module__, command.run.__name__)
        self.passed: dict[str, Parameter] = {}
        self.rare: dict[str, Parameter] = {}
        if not command.function:
            return
        # the public function itself
        del self.own[next(iter(self.own))]
        module = list_public_names()[command.function]
        for name, parameter in read_signature(module, command.function).items():
            if name in command.rare:
                self.rare[name] = parameter
            elif name != command.rare_into and name not in command.python_only:
                self.passed[name] = parameter

    def build(self) -> Any:
        """Return the function, with the signature that Typer reads."""

        def run(**values: Any) -> None:
            texts = values.pop("rare", None) or []
            arguments = {name: _expand_home(value) for name, value in values.items()}
            if self._has_output and arguments["output"] is None:
                arguments["output"] = choose_output(self.command.run.__name__, arguments)
            own_values = {name: arguments.pop(name) for name in self.own}
            if not self.command.function:
                self.command.run(**own_values)
                return
            for name, value in arguments.items():
                if self.passed[name].kind == Names:
                    names = value.split(",")
                    arguments[name] = tuple(part.strip() for part in names if part)
            arguments |= self._read_rare(texts)

            # The command may look at the values before the function, with torch, is imported.
            def call(*positional: Any, **values: Any) -> Any:
                return getattr(import_module("vit"), self.command.function)(*positional, **values)

            self.command.run(partial(call, **arguments), **own_values)

        parameters = [self._build_parameter(parameter) for parameter in self._sort()]
        if self.rare or self.command.rare_into:
            text = "Set one of the options below. May be repeated."
            info = typer.Option("--option", metavar="NAME=VALUE", help=text)
            kind = Annotated[list[str] | None, info]
            parameters.append(
                inspect.Parameter("rare", _KEYWORD_ONLY, default=None, annotation=kind)
            )
        run.__doc__ = (inspect.getdoc(self.command.run) or "").partition("Args:\n")[0]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    @property
    def _has_output(self) -> bool:
        """True if the command needs a directory for its results."""
        output = self.own.get("output") or self.passed.get("output")
        return output is not None and output.default is REQUIRED

    def _sort(self) -> list[Parameter]:
        """Return the parameters: arguments, required options, the others; the public function's
        before the command's own."""
        merged = {name: self.own.get(name, each) for name, each in self.passed.items()} | self.own

        arguments = [each for each in merged.values() if not each.is_keyword]
        options = [each for each in merged.values() if each.is_keyword]
        return arguments + sorted(options, key=lambda option: option.default is not REQUIRED)

    def _build_parameter(self, parameter: Parameter) -> inspect.Parameter:
        name, kind, default = parameter.name, parameter.kind, parameter.default
        text = self.describe(parameter)
        if name == "output" and default is REQUIRED:
            default = None
            text += "  [default: runs/NAME-N]"
        if kind == Names:
            kind = str
            default = default if isinstance(default, str) else ",".join(default)
        if parameter.is_keyword:
            minimum, maximum = parameter.bounds
            info = typer.Option(
                self._find_flag(parameter),
                *(["-o"] if name == "output" else []),
                help=text,
                min=minimum,
                max=maximum,
                metavar=_METAVARS.get(kind),
            )
        else:
            info = typer.Argument(help=text, metavar=self._find_flag(parameter))
        return inspect.Parameter(
            name,
            _KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is REQUIRED else default,
            annotation=Annotated[kind | None if default is None else kind, info],
        )

    def _find_flag(self, parameter: Parameter) -> str:
        """Return the option of a parameter, or the name of its argument."""
        flag = self.command.flags.get(parameter.name, parameter.name)
        if not parameter.is_keyword:
            return flag.upper()
        return flag if flag.startswith("--") else f"--{flag.replace('_', '-')}"

    def describe(self, parameter: Parameter) -> str:
        """Return the help of a parameter, in which others are named as on the command line."""
        text = self.command.help.get(parameter.name, parameter.help)

        def name_flag(match: re.Match[str]) -> str:
            meant = self.own.get(match[1]) or self.passed.get(match[1])
            return self._find_flag(meant) if meant else match[1]

        return re.sub(r"`([^`]+)`", name_flag, text)

    def _read_rare(self, texts: list[str]) -> dict[str, Any]:
        """Return the values of --option NAME=VALUE.

        Raises:
            ValueError: A text is not NAME=VALUE, there is no such option, or its value is wrong.
        """
        values: dict[str, Any] = {}
        others = values.setdefault(self.command.rare_into, {}) if self.command.rare_into else None
        for text in texts:
            name, equals, value = text.partition("=")
            if equals and name in self.rare:
                values[name] = check_value(name, value, self.rare[name].kind)
            elif equals and others is not None:
                others[name] = value
            else:
                raise ValueError(
                    f"--option {shorten(text)!r} is not NAME=VALUE with one of {', '.join(self.rare)}"
                )
        return values


def choose_output(command: str, arguments: Mapping[str, Any]) -> Path:
    """Choose a new directory for the results of a command, which names it when it ends: runs/photos-1
    for `vit train photos`, runs/photos-1-explain-1 for `vit explain runs/photos-1`.

    Args:
        command: Name of the command.
        arguments: Values of its arguments and options.

    Raises:
        ValueError: A run is to be resumed, or several processes would choose.
    """
    if arguments.get("resume"):
        raise ValueError("--resume goes on in a directory; name it with --output")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes need one directory; name it with --output")
    first = (
        value[0] if isinstance(value, list) else value for value in arguments.values() if value
    )
    name = next((value for value in first if isinstance(value, str)), command)
    source = Path(name)
    if source.exists():
        source = source.resolve()
        # a run's model file is called by its directory
        if source.name == MODEL_FILE:
            source = source.parent
        name = source.name if source.is_dir() else source.stem
    # the name of a recipe has a slash
    name = clean_name(name.replace("/", "-"))
    if command != "train":
        name = f"{name}-{command}"
    number = 1
    while (directory := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return directory


def _keep_hyphens(text: str) -> str:
    return text.replace("-", _HYPHEN)


def _expand_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return expand_home(value) if isinstance(value, Path) else value
