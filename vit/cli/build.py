"""How a command of the command line is made.

The public function's signature and its `Args:` are the only place of an option's name, type,
default and text. They are read from the source, so that `--help` needs no torch
(`vit.runtime.signatures`).

- A parameter before the `*` is an argument, one after it an option: `batch_size` is --batch-size.
- Its help is the first sentence under `Args:`; "None: …" says what the default None means.
- `@check_arguments(batch_size=(1, None))` gives the smallest and largest value.
- A required `output` has a default, `choose_output`.

A command is a module with a `COMMAND` that `vit.cli.main` names: see vit/analysis/audit/command.py.
Its function `run` receives the public function with its options filled in, then its own parameters,
which are read in the same way; one with the name of an option replaces it. The first sentence of
its docstring is shown in `vit --help`: at most 60 characters.
"""

import inspect
import os
import re
from collections.abc import Mapping
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer

from vit.model.find_file import MODEL_FILE
from vit.runtime.command import Call, Command
from vit.runtime.files import clean_name, expand_home
from vit.runtime.signatures import (
    REQUIRED,
    Names,
    Parameter,
    list_public_names,
    read_signature,
)

_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def add_command(app: typer.Typer, command: Command) -> None:
    """Add a command to the command line."""
    title = (inspect.getdoc(command.run) or "").partition("\n")[0]
    app.command(command.run.__name__, short_help=title)(build_function(command))


def read_parameters(command: Command) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Return the parameters of the public function that are arguments or options, and the command's
    own."""
    own = dict(read_signature(command.run.__module__, command.run.__name__))
    if not command.function:
        return {}, own
    # the public function itself
    del own[next(iter(own))]
    parameters = read_signature(list_public_names()[command.function], command.function)
    return {name: each for name, each in parameters.items() if name not in command.python_only}, own


def build_function(command: Command) -> Any:
    """Return a function with the signature that Typer reads, which runs the command."""
    passed, own = read_parameters(command)
    merged = {name: own.get(name, each) for name, each in passed.items()} | own
    flags = {name: _find_flag(command, each) for name, each in merged.items()}

    def run(context: typer.Context, **values: Any) -> None:
        arguments = {name: _read(value, merged[name]) for name, value in values.items()}
        output = merged.get("output")
        if output and output.default is REQUIRED and arguments["output"] is None:
            arguments["output"] = choose_output(command.run.__name__, arguments)
        own_values = {name: arguments.pop(name) for name in own}
        if not command.function:
            command.run(**own_values)
            return

        # The command may look at the values before the function, with torch, is imported.
        def function(*positional: Any, **values: Any) -> Any:
            return getattr(import_module("vit"), command.function)(*positional, **values)

        call = Call(function, **arguments)
        call.given = {
            name: flags[name].partition("/")[0]
            for name in values
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        }
        command.run(call, **own_values)

    parameters = [
        inspect.Parameter("context", _KEYWORD_ONLY, annotation=typer.Context),
        *(_build_parameter(each, flags) for each in merged.values() if not each.is_keyword),
        *(_build_parameter(each, flags) for each in merged.values() if each.is_keyword),
    ]
    run.__doc__ = (inspect.getdoc(command.run) or "").partition("Args:\n")[0]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _build_parameter(parameter: Parameter, flags: Mapping[str, str]) -> inspect.Parameter:
    name, kind, default = parameter.name, parameter.kind, parameter.default
    # other parameters are named as on the command line
    text = re.sub(r"`([^`]+)`", lambda match: flags.get(match[1], match[1]), parameter.help)
    if name == "output" and default is REQUIRED:
        default = None
        text += "  [default: runs/NAME-N]"
    if kind == Names:
        kind = str
        default = default if isinstance(default, str) else ",".join(default)
    info: Any = typer.Argument(help=text, metavar=flags[name])
    if parameter.is_keyword:
        short = ["-o"] if name == "output" else []
        minimum, maximum = parameter.bounds
        info = typer.Option(flags[name], *short, help=text, min=minimum, max=maximum)
    return inspect.Parameter(
        name,
        _KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is REQUIRED else default,
        annotation=Annotated[kind | None if default is None else kind, info],
    )


def _find_flag(command: Command, parameter: Parameter) -> str:
    """Return the option of a parameter, or the name of its argument."""
    flag = command.flags.get(parameter.name, parameter.name)
    if not parameter.is_keyword:
        return flag.upper()
    return flag if flag.startswith("--") else f"--{flag.replace('_', '-')}"


def _read(value: Any, parameter: Parameter) -> Any:
    """Return the value of an option as the function takes it."""
    if parameter.kind == Names and value is not None:
        return tuple(part.strip() for part in value.split(",") if part)
    if isinstance(value, Path):
        return expand_home(value)
    return value


def choose_output(command: str, arguments: Mapping[str, Any]) -> Path:
    """Choose a new directory for the results of a command: runs/photos-1 for `vit train photos`,
    runs/photos-1-explain-1 for `vit explain runs/photos-1`.

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
    values = (each[0] if isinstance(each, list) else each for each in arguments.values() if each)
    name = next((value for value in values if isinstance(value, str)), command)
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
    return next(
        folder for number in count(1) if not (folder := Path("runs") / f"{name}-{number}").exists()
    )
