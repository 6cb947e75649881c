"""`vit train`: from a configuration to a trained, self-sufficient model file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit.cli.common import Output, build_console, build_facts_table

if TYPE_CHECKING:
    from vit.build.run import Run

REQUEUE = 75  # EX_TEMPFAIL: stopped by a signal, or without another process; a scheduler may start it again
_CONFIG = "images (a folder, table, shards or data set), or a YAML file or recipe; with --resume the run's own"
_INIT = "weights to start from: a model file, a run directory or timm:NAME"
_MINUTES = "of training, where images are named; default: 5 on a CPU, 20 on a GPU"


def train(
    config: Annotated[str | None, typer.Argument(help=_CONFIG)] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value …, applied to the file")] = None,
    *,
    output: Output,
    init: Annotated[str | None, typer.Option(help=_INIT)] = None,
    minutes: Annotated[float | None, typer.Option(min=0.01, help=_MINUTES)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the last checkpoint")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the run that is there")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the plan and one batch, then stop")] = False,
) -> None:
    """Train a model, on images alone or by a configuration.

    Ctrl-C saves and stops (exit code 75); --resume continues, to the same result bit for bit.
    """
    from vit import api
    from vit.runtime.processes import LostProcess
    from vit.training.signals import Stopped

    changes = overrides or []
    if config is not None and "=" in config and not Path(config).exists():
        changes, config = [config, *changes], None
    mode: dict[str, Any] = {"init": init, "minutes": minutes}
    mode |= {"resume": resume, "overwrite": overwrite, "dry_run": dry_run}
    try:
        result = api.train(config, output=output, overrides=changes, **mode, on_start=_show_summary)
    except (Stopped, LostProcess) as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(REQUEUE) from None
    if dry_run:
        typer.echo(f"one batch as the model gets it: {output / 'dry_run.png'}", err=True)
    elif os.environ.get("RANK", "0") == "0":  # of the processes that torchrun started only the first talks to the user
        top1 = "" if result.best_top1 is None else f", validation top-1 {result.best_top1:.2%}"
        typer.echo(f"{result.steps} steps in {result.seconds:.0f} s; model: {result.model_path}{top1}", err=True)


def _show_summary(run: "Run", resumed: bool) -> None:
    from vit.build.run_checks import list_warnings
    from vit.build.summary import list_unreadable, summarize_run

    console = build_console(stderr=True)
    console.print(build_facts_table(summarize_run(run)))
    for sentence in list_unreadable(run):
        console.print(sentence, soft_wrap=True)
    for sentence in [] if resumed else list_warnings(run):
        console.print(f"warning: {sentence}", style="yellow", soft_wrap=True)
    if resumed:
        console.print(f"resuming after step {run.trainer.progress.step} of {run.trainer.plan.total_steps}")
