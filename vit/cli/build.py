"""How a command of the command line is made.

The public function's signature and its `Args:` are the only place of an option's name, type,
default and text. They are read from the source, so that `--help` needs no torch.

- A parameter before the `*` is an argument, one after it an option: `batch_size` is --batch-size.
- Its help is the first sentence under `Args:`; "None: …" says what the default None means.
- A required `output` has a default, `choose_output`.

A command is a module with a `COMMAND` that `vit.cli.main` names: see vit/analysis/audit/command.py.
The parameters of its function `run` are read in the same way; one with the name of an option
replaces it. The first sentence of its docstring is shown in `vit --help`: at most 60 characters.
"""

import inspect
import os
import re
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from vit.runtime.arguments import as_tuple
from vit.runtime.command import Command
from vit.runtime.files import clean_name, compute_and_save, expand_home
from vit.runtime.signatures import Names, Parameter, list_public_names, read_signature

# second names of options
_SHORT = {"output": ("-o",)}
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_REQUIRED = inspect.Parameter.empty
Parameters = dict[str, Parameter]


def add_command(app: typer.Typer, command: Command) -> None:
    """Add a command to the command line."""
    # Typer reads the signature
    passed, own = read_parameters(command)
    merged = passed | own
    flags = {name: find_flag(command, each) for name, each in merged.items()}

    def run(**values: Any) -> None:
        arguments = {name: _convert(value, merged[name]) for name, value in values.items()}
        if "output" in merged and merged["output"].default is _REQUIRED:
            arguments["output"] = arguments["output"] or choose_output(
                command.run.__name__, arguments
            )
        own_values = {name: arguments.pop(name) for name in own}
        call = partial(_call, command.function, **arguments)
        if command.is_saved:
            command.run(compute_and_save(call, **own_values), own_values["output"])
        elif command.function:
            command.run(call, **own_values)
        else:
            command.run(**own_values)

    # arguments before options
    ordered = sorted(merged.values(), key=attrgetter("is_keyword"))
    parameters = [_build_parameter(each, flags) for each in ordered]
    text = inspect.getdoc(command.run) or ""
    run.__doc__ = text.partition("Args:\n")[0]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(command.run.__name__, short_help=text.partition("\n")[0])(run)


def read_parameters(command: Command) -> tuple[Parameters, Parameters]:
    """Return the parameters of the public function that are arguments or options, and the command's
    own."""
    function = compute_and_save if command.is_saved else command.run
    own = read_signature(function.__module__, function.__name__)
    passed = {}
    if command.function:
        # the public function itself
        del own[next(iter(own))]
        passed = read_signature(list_public_names()[command.function], command.function)
    for name in command.python_only:
        passed.pop(name, None)
    for name, kind in command.kinds.items():
        passed[name] = passed[name]._replace(kind=kind)
    return passed, own


def _call(function: str, /, *positional: Any, **values: Any) -> Any:
    # imported with torch, after the command has looked at the values
    return getattr(import_module("vit"), function)(*positional, **values)


def _build_parameter(parameter: Parameter, flags: Mapping[str, str]) -> inspect.Parameter:
    name, kind, default = parameter.name, parameter.kind, parameter.default
    # other parameters are named as on the command line
    text = re.sub(r"`([^`]+)`", lambda match: flags.get(match[1], match[1]), parameter.help)
    if name == "output" and default is _REQUIRED:
        default = None
        text += "  [default: runs/NAME-N]"
    if kind == Names:
        kind = str
        default = ",".join(as_tuple(default))
    info: Any = typer.Argument(help=text, metavar=flags[name])
    if parameter.is_keyword:
        info = typer.Option(flags[name], *_SHORT.get(name, ()), help=text)
    if default is None:
        kind |= None
    return inspect.Parameter(name, _KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def find_flag(command: Command, parameter: Parameter) -> str:
    """Return the option of a parameter, or the name of its argument."""
    flag = command.flags.get(parameter.name, parameter.name)
    if not parameter.is_keyword:
        return flag.upper()
    if flag.startswith("--"):
        return flag
    return f"--{flag.replace('_', '-')}"


def _convert(value: Any, parameter: Parameter) -> Any:
    """Return the value of an option as the function takes it."""
    if parameter.kind == Names and value is not None:
        return tuple(part.strip() for part in value.split(",") if part)
    if isinstance(value, Path):
        return expand_home(value)
    return value


def choose_output(command: str, arguments: Mapping[str, Any]) -> Path:
    """Choose a new directory for the results of a command from the values of its arguments:
    runs/photos-1 for `vit train photos`, runs/photos-1-explain-1 for `vit explain runs/photos-1`.
    """
    if arguments.get("resume"):
        raise ValueError("--resume goes on in a directory; name it with --output")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("several processes need one directory; name it with --output")
    values = (each[0] if isinstance(each, list) else each for each in arguments.values() if each)
    name = next((value for value in values if isinstance(value, str)), command)
    if os.path.exists(name):
        name = Path(name).resolve().stem
    # the name of a recipe has a slash
    name = clean_name(name.replace("/", "-"))
    if command != "train":
        name = f"{name}-{command}"
    return next(
        folder for number in count(1) if not (folder := Path("runs") / f"{name}-{number}").exists()
    )
