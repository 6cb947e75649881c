"""The `vit` command: registers the subcommands and turns a user's mistake into one line and exit code 2."""

import os
import re
import shlex
import sys
import threading
from typing import Annotated, Any

import typer

import vit
from vit.cli.attention import attention
from vit.cli.compare import compare
from vit.cli.evaluate import evaluate
from vit.cli.export import export
from vit.cli.faithfulness import faithfulness
from vit.cli.info import info
from vit.cli.predict import predict
from vit.cli.recipes import recipes
from vit.cli.serve import serve
from vit.cli.train import train
from vit.runtime.arguments import first_line, printable, shorten

_USAGE_ERROR: Any = typer.BadParameter.__base__  # Click's UsageError, of which Typer has a copy

app = typer.Typer(
    name="vit",
    help="Train vision transformers on your own images, evaluate them and explain them with attention maps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, recipes, evaluate, attention, info, predict, compare, faithfulness, export, serve):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vit {vit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # printed while the options are read: without a command nothing is called
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; it ends with one line, never a traceback, and with the exit code

    2 for a mistake that is the user's to mend (ValueError, OSError, an unknown option, too little memory), and 70 for a
    defect of ours: the line says where the report of it is. With VIT_DEBUG=1 in the environment the traceback is shown.
    """
    # Read when torch loads its OpenMP runtime. Threads that wait for one another spin long by default, which brings
    # a machine shared with other work to a crawl (28 images/s instead of 1,500 on the digits, one of 2 cores taken);
    # sleeping at once costs a quiet machine 15 to 37 %. A short spin is as fast as a long one there.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    hook, threading.excepthook = threading.excepthook, _report_thread
    try:
        code = app(args=arguments, prog_name="vit", standalone_mode=False)
    except Exception as error:
        if os.environ.get("VIT_DEBUG") == "1":
            raise
        code = _report(error, sys.argv[1:] if arguments is None else arguments)
    finally:
        threading.excepthook = hook
    sys.exit(code if isinstance(code, int) else 0)


def _report_thread(failed: Any) -> None:
    """Of a library, such as TensorBoard's writer; what it did is missed where it is needed."""
    print(f"vit: {failed.exc_type.__name__}: {failed.exc_value}", file=sys.stderr)


def _report(error: Exception, arguments: list[str]) -> int:
    """Tell the user about an error in one line; the exit code."""
    code = 2
    if isinstance(error, BrokenPipeError):  # what read our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, _USAGE_ERROR):
        where = error.ctx.command_path if error.ctx else "vit"
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            return code
        text = f"{error.format_message()} ({where} --help lists the options)"
        if where == "vit train" and (option := getattr(error, "option_name", None)):
            text = _suggest_override(option, arguments) or text
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    elif isinstance(error, ValueError | OSError):
        text = str(error) or type(error).__name__
    elif isinstance(error, MemoryError) or re.search("OutOfMemory|allocate memory|not enough memory", repr(error)):
        text = f"not enough memory ({first_line(error)}); try a smaller batch size, image size or model"
    else:
        code, text = 70, f"{type(error).__name__}: {first_line(error)}; this is a defect of vit, {_save_report(error)}"
    print(f"vit: error: {printable(shorten(' '.join(text.split()), 2000))}", file=sys.stderr)
    return code


def _suggest_override(option: str, arguments: list[str]) -> str | None:
    """What to write in place of an option that is the name of a configuration key."""
    from vit.config import Config, flatten_config

    name = option.lstrip("-").replace("-", "_")
    if not (keys := [key for key in flatten_config(Config()) if key.partition(".")[2] == name]):
        return None
    given = next((text for text in arguments if text.partition("=")[0] == option), option)
    after = arguments[arguments.index(given) + 1 :] if given == option else [given.partition("=")[2]]
    value = after[0] if after and not after[0].startswith("-") else "VALUE"
    return f"there is no option {option}; use {' or '.join(f'{key}={value}' for key in keys)}"


def _save_report(error: Exception) -> str:
    """Write the traceback to a file; where it is, as the end of a sentence."""
    import tempfile
    import traceback

    lines = [f"vit {vit.__version__}, Python {sys.version}", shorten(shlex.join(sys.argv), 2000)]
    try:
        with tempfile.NamedTemporaryFile("w", prefix="vit-report-", suffix=".txt", delete=False) as file:
            file.write("\n".join([*lines, *traceback.format_exception(error)]))
    except OSError:
        return "and its report could not be written; VIT_DEBUG=1 shows it"
    return f"please send us {file.name}"
