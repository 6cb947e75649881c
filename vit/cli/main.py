"""The `vit` command: registers the subcommands, and reports a user's mistake in one line with exit
code 2."""

import os
import re
import signal
import sys
import threading
import warnings
from importlib import import_module
from typing import Any

import typer

import vit
from vit.cli.build import add_command
from vit.runtime.arguments import first_line, replace_control_characters, shorten
from vit.runtime.console import echo
from vit.runtime.drive import DriveError

# Typer has a private copy of Click, and exports only this subclass of its UsageError.
_USAGE_ERROR: Any = typer.BadParameter.__base__
# torch's messages about too little memory, which are RuntimeErrors
_OUT_OF_MEMORY = "OutOfMemory|allocate memory|not enough memory"

app = typer.Typer(
    name="vit",
    help=(vit.__doc__ or "").partition("\n")[0],
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# in the order of the list of commands
COMMANDS = (
    "vit.training.command",
    "vit.cli.recipes",
    "vit.analysis.audit.command",
    "vit.cli.evaluate",
    "vit.cli.explain",
    "vit.cli.info",
    "vit.cli.predict",
    "vit.analysis.compare.command",
    "vit.analysis.faithfulness.command",
    "vit.analysis.robustness.command",
    "vit.deploy.export.command",
    "vit.deploy.serve.command",
)
for command in COMMANDS:
    add_command(app, import_module(command).COMMAND)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"vit {vit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    # printed while the options are read, because without a command nothing runs
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None: ...


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, with the arguments of this process or others, and exit.

    An error is reported in one line. The exit code is 2 for a user's mistake (ValueError, OSError,
    an unknown option, too little memory), and 70 for an internal error. With VIT_DEBUG=1 in the
    environment the traceback is shown instead.
    """
    # torch's OpenMP runtime reads this variable when it is loaded. By default, threads that wait
    # for each other spin for a long time, which slows down a shared machine (28 images/s instead of
    # 1,500 on the digits, with one of 2 cores busy).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    warnings.formatwarning = _format_warning
    # SIGTERM ends the command like an error, so that no temporary file is left.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = app(args=arguments, prog_name="vit", standalone_mode=False)
        # Python itself would report a full disk in several lines.
        sys.stdout.flush()
    except Exception as error:
        if os.environ.get("VIT_DEBUG") == "1":
            raise
        code = _report(error)
        try:
            sys.stdout.flush()
        except OSError:
            # Python would try again, and fail, when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """Format a warning as one line, without its place in the code."""
    lines = str(message).splitlines()
    return f"warning: {replace_control_characters(lines[0])}\n"


def _report(error: Exception) -> int:
    """Report an error to the user in one line, and return the exit code."""
    # The reader of our output, such as `head`, has ended.
    if isinstance(error, BrokenPipeError):
        return 1
    # `vit` without a command shows its help.
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return 2

    code = 2
    text = str(error) or type(error).__name__
    if isinstance(error, _USAGE_ERROR):
        text = f"{error.format_message()} (--help lists the options)"
    elif isinstance(error, EOFError | ConnectionResetError) or "DataLoader worker" in text:
        text = (
            f"a data-loading worker was killed ({first_line(error)}; out of memory, or a full"
            " /dev/shm?); continue with --resume and fewer data.workers"
        )
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}".removesuffix(": None")
    elif isinstance(error, ValueError | OSError | DriveError):
        pass
    elif isinstance(error, MemoryError) or re.search(_OUT_OF_MEMORY, repr(error)):
        hint = "try a smaller batch size, image size or model, or fewer data.workers"
        text = f"not enough memory ({first_line(error)}); {hint}"
    else:
        code = 70
        problem = f"{type(error).__name__}: {first_line(error)}"
        text = f"internal error, a bug in vit: {problem}; VIT_DEBUG=1 shows where"
    text = replace_control_characters(shorten(" ".join(text.split()), 2000))
    print(f"vit: error: {text}", file=sys.stderr)
    return code
