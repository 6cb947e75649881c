"""The `vit` command: registers the subcommands and turns a user's mistake into one line and exit code 2."""

import os
import sys
from typing import Annotated

import typer

import vit
from vit.cli.attention import attention
from vit.cli.compare import compare
from vit.cli.evaluate import evaluate
from vit.cli.export import export
from vit.cli.faithfulness import faithfulness
from vit.cli.info import info
from vit.cli.predict import predict
from vit.cli.train import train

app = typer.Typer(
    name="vit",
    help="Train vision transformers on your own images, evaluate them and explain them with attention maps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, evaluate, attention, info, predict, compare, faithfulness, export):
    app.command()(command)


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"vit {vit.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. A ValueError or OSError is the user's to mend: its sentence and exit code 2.

    With VIT_DEBUG=1 in the environment the traceback is shown instead.
    """
    # Read when torch loads its OpenMP runtime. Threads that wait for one another spin long by default, which brings
    # a machine shared with other work to a crawl (28 images/s instead of 1,500 on the digits, one of 2 cores taken);
    # sleeping at once costs a quiet machine 15 to 37 %. A short spin is as fast as a long one there.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        app(args=arguments, prog_name="vit")
    except (ValueError, OSError) as error:
        if os.environ.get("VIT_DEBUG") == "1":
            raise
        print(f"vit: error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return " ".join(str(error).split()) or type(error).__name__
