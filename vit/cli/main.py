"""The `vit` command: registers the subcommands and turns a user's mistake into one line and exit
code 2."""

import os
import re
import shlex
import signal
import sys
import threading
import warnings
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer

import vit
from vit.cli.build import add_command
from vit.cli.explain import explain
from vit.cli.parameters import build_command
from vit.deploy.export.command import export
from vit.runtime.arguments import (
    first_line,
    hide_tokens,
    replace_control_characters,
    shorten,
)

# Typer has a private copy of Click and exports only this subclass of its UsageError
_USAGE_ERROR: Any = typer.BadParameter.__base__
# what libraries say, the latter under a limit of addresses (ulimit -v)
_OUT_OF_MEMORY = (
    "OutOfMemory|allocate memory|not enough memory|failed to map segment|bad_alloc|start new thread"
)

app = typer.Typer(
    name="vit",
    help="Train vision transformers on your own images, evaluate them and explain them with attention maps.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# in the order of the list of commands; a command that is a function is not converted yet
COMMANDS = (
    "vit.training.command",
    "vit.cli.recipes",
    "vit.analysis.audit.command",
    "vit.cli.evaluate",
    explain,
    "vit.cli.info",
    "vit.cli.predict",
    "vit.analysis.compare.command",
    "vit.analysis.faithfulness.command",
    export,
    "vit.deploy.serve.command",
)
for command in COMMANDS:
    if isinstance(command, str):
        add_command(app, import_module(command).COMMAND)
        continue
    app.command()(build_command(command))
    # many know it by this name
    if command is explain:
        app.command("attention", hidden=True)(build_command(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vit {vit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # printed while the options are read: without a command nothing is called
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None: ...


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. It ends with one line, never a traceback, and with the exit code 2 for
    a user's mistake (ValueError, OSError, an unknown option, too little memory), or 70 for an
    internal error; that line says where the report is. With VIT_DEBUG=1 in the environment the
    traceback is shown.

    Args:
        arguments: of the command; None: those of this process.
    """
    # Read when torch loads its OpenMP runtime. Threads that wait for one another spin long by
    # default, which brings a machine shared with other work to a crawl (28 images/s instead of
    # 1,500 on the digits, one of 2 cores taken); sleeping at once costs a quiet machine 15 to 37 %.
    # A short spin is as fast as a long one there.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    if arguments is None:
        arguments = sys.argv[1:]
    _prepare_streams()
    original_hook = threading.excepthook
    threading.excepthook = _report_thread
    original_format = warnings.formatwarning
    warnings.formatwarning = _format_warning
    original_handler = _exit_on_sigterm()
    try:
        code = app(args=arguments, prog_name="vit", standalone_mode=False)
    except Exception as error:
        if os.environ.get("VIT_DEBUG") == "1":
            raise
        code = _report(error, arguments)
    finally:
        threading.excepthook = original_hook
        warnings.formatwarning = original_format
        if original_handler is not None:
            signal.signal(signal.SIGTERM, original_handler)
    sys.exit(code)


def _exit_on_sigterm() -> Any:
    """Let SIGTERM end the command as an error does, so that no temporary file stays; training has a
    handler of its own meanwhile.

    Returns:
        The handler that was there; None where none was replaced.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return None
    process = os.getpid()

    def stop(number: int, _: object) -> None:
        # a worker that was forked from this process ends at once
        if os.getpid() != process:
            os._exit(128 + number)
        sys.exit(128 + number)

    return signal.signal(signal.SIGTERM, stop)


def _prepare_streams() -> None:
    """Make standard streams that are closed, a terminal of no width, and an encoding that lacks
    characters, what everything that prints can deal with."""
    # a file that is opened must not get the number of a stream: it would be printed into
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(descriptor)
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115 (for good)
    if "stdout" in closed:
        print("warning: standard output is closed; what is printed is lost", file=sys.stderr)

    # nothing would be shown
    width = os.environ.get("COLUMNS", "80")
    if not width.isdecimal() or int(width) == 0:
        del os.environ["COLUMNS"]
    for stream in (sys.stdout, sys.stderr):
        # a test's stream is another kind
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """One line about an error in a library's thread, such as TensorBoard's writer."""
    print(f"vit: {failed.exc_type.__name__}: {failed.exc_value}", file=sys.stderr)


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    """One line, without the place in the code."""
    lines = hide_tokens(str(message)).splitlines()
    return f"warning: {lines[0]}\n"


def _report(error: Exception, arguments: list[str]) -> int:
    """Tell the user about an error in one line.

    Returns:
        The exit code.
    """
    # what read our output, such as `head`, has ended
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    # of `vit` alone: its message is the help
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]  # of Typer's copy of Click
        return 2

    text = _describe_user_error(error, arguments)
    code = 2
    if text is None:
        report = _save_report(error)
        text = (
            f"internal error, a bug in vit: {type(error).__name__}: {first_line(error)}; {report}"
        )
        code = 70
    text = hide_tokens(" ".join(text.split()))
    one_line = replace_control_characters(shorten(text, 2000))
    print(f"vit: error: {one_line}", file=sys.stderr)
    return code


def _describe_user_error(error: Exception, arguments: list[str]) -> str | None:
    """The sentence for a user's mistake; None for an error that is ours."""
    if isinstance(error, _USAGE_ERROR):
        command = error.ctx.command_path if error.ctx else "vit"
        option = getattr(error, "option_name", None)
        suggestion = None
        if command == "vit train" and option:
            suggestion = _suggest_override(option, arguments)
        return suggestion or f"{error.format_message()} ({command} --help lists the options)"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    if isinstance(error, ValueError | OSError):
        return str(error) or type(error).__name__
    # torch has several errors for it
    is_out_of_memory = re.search(_OUT_OF_MEMORY, repr(error))
    if isinstance(error, MemoryError) or is_out_of_memory:
        hint = "try a smaller batch size, image size or model"
        return f"not enough memory ({first_line(error)}); {hint}"
    return None


def _suggest_override(option: str, arguments: list[str]) -> str | None:
    """What to write in place of an option that is the name of a configuration key."""
    # pydantic and yaml, which `vit --help` does without
    from vit.config import Config, flatten_config

    name = option.lstrip("-").replace("-", "_")
    keys = [key for key in flatten_config(Config()) if key.partition(".")[2] == name]
    if not keys:
        return None
    # --epochs=3 or --epochs 3
    match = re.search(rf"{option}(?:=| (?!-))(\S+)", " ".join(arguments))
    value = match[1] if match else "VALUE"
    return f"there is no option {option}; use {' or '.join(f'{key}={value}' for key in keys)}"


def _save_report(error: Exception) -> str:
    """Write the traceback to a file.

    Returns:
        Where it is, as the end of a sentence.
    """
    # only after an internal error
    import tempfile
    import traceback

    command = shorten(hide_tokens(shlex.join(sys.argv)), 2000)
    try:
        descriptor, path = tempfile.mkstemp(prefix="vit-report-", suffix=".txt")
        with open(descriptor, "w") as file:
            file.write(f"vit {vit.__version__}, Python {sys.version}\n{command}\n")
            file.write(hide_tokens("".join(traceback.format_exception(error))))
    except OSError:
        return "its report could not be written; VIT_DEBUG=1 shows it"
    return f"please report it with {path}"
