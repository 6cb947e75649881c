"""`vit train`: from a configuration, or images alone, to a model file that needs nothing else."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vit.cli.common import build_console, build_table
from vit.options import TrainOptions

if TYPE_CHECKING:
    from vit.factory.run import Run

# EX_TEMPFAIL: stopped by a signal, or without another process; a scheduler may start it again
REQUEUE = 75


def train(
    config: str | None = None,
    overrides: list[str] | None = None,
    *,
    output: Path,
    options: TrainOptions,
) -> None:
    """Train a model, on images alone or by a configuration.

    Ctrl-C saves and stops (exit code 75); --resume continues, to the same result bit for bit.

    Args:
        config: images (a folder, table, shards or data set), or a YAML file or recipe; with
            --resume the run's own
        overrides: key.path=value …, applied to the file
        output: directory for the results
    """
    # torch, which `vit --help` does without
    from vit.factory.run import UserObjects
    from vit.factory.train_model import train_model
    from vit.runtime.processes import ProcessLostError
    from vit.training.signals import TrainingInterrupted

    # `vit train --resume train.epochs=3`: the first argument is an override already
    if config is not None and "=" in config and not Path(config).exists():
        overrides = [config, *(overrides or [])]
        config = None
    try:
        show = partial(_show_summary, dry_run=options.dry_run)
        result = train_model(config, overrides or [], output, options, UserObjects(), on_start=show)
    except (TrainingInterrupted, ProcessLostError) as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(REQUEUE) from None

    if options.dry_run:
        typer.echo(f"one batch as the model gets it: {output / 'dry_run.png'}", err=True)
    # of the processes that torchrun started only the first talks to the user
    elif os.environ.get("RANK", "0") == "0":
        message = f"{result.steps} steps in {result.seconds:.0f} s; model: {result.model_path}"
        if result.best_top1 is not None:
            message += f", validation top-1 {result.best_top1:.2%}"
        typer.echo(message, err=True)


def _show_summary(run: "Run", resumed: bool, *, dry_run: bool) -> None:
    from vit.factory.summary import list_unreadable, list_warnings, summarize_run

    console = build_console(stderr=True)
    facts = summarize_run(run, with_estimate=dry_run)
    console.print(build_table(facts.items(), num_text_columns=2))
    for sentence in list_unreadable(run):
        console.print(sentence, soft_wrap=True)
    if resumed:
        trainer = run.trainer
        step = trainer.progress.step
        console.print(f"resuming after step {step} of {trainer.plan.total_steps}")
    else:
        for sentence in list_warnings(run):
            console.print(f"warning: {sentence}", style="yellow", soft_wrap=True)
