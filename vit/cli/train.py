"""`vit train`: from a configuration, or images alone, to a model file that needs nothing else."""

import os
from pathlib import Path

import typer

from vit.options import TrainOptions

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

    Ctrl-C saves and stops (exit code 75); --resume continues, to the same result bit for bit
    (on a GPU with train.deterministic=true, on the same kind of card and torch).

    Args:
        config: images (a folder, table, shards or data set), or a YAML file or recipe; with
            --resume the run's own
        overrides: key.path=value …, applied to the file
        output: directory for the results
    """
    # torch, which `vit --help` does without
    from vit.runtime.processes import ProcessLostError
    from vit.training.signals import TrainingInterrupted
    from vit.training.train_model import train_model
    from vit.training.user_objects import UserObjects

    # `vit train --resume train.epochs=3`: the first argument is an override already
    key, equals, _ = (config or "").partition("=")
    # an address may have parameters
    is_override = equals and "://" not in key and not Path(config or "").exists()
    if config is not None and is_override:
        overrides = [config, *(overrides or [])]
        config = None
    try:
        result = train_model(
            config, overrides or [], output, options, UserObjects(), shows_plan=True
        )
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
