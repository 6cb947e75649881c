"""`vit train`: from a configuration, or images alone, to a model file that needs nothing else."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import typer

from vit.runtime.command import Command
from vit.runtime.console import echo
from vit.runtime.numbers import format_percent

# EX_TEMPFAIL: stopped by a signal, or another process was lost; a scheduler may start the run again
REQUEUE = 75


def train(
    start: partial[Any],
    config: str | None = None,
    overrides: list[str] | None = None,
    *,
    output: Path,
) -> None:
    """Train a model, on images alone or by a configuration.

    Ctrl-C saves and stops (exit code 75); --resume continues.

    Args:
        config: Images (a folder, table, shards or data set), a YAML file or a recipe.
        overrides: Changes of the configuration: key.path=value.
        output: Directory for the results.
    """
    overrides = overrides or []
    # `vit train --resume train.epochs=3`: the first argument is an override already
    if config is not None and "=" in config and not Path(config).exists():
        overrides = [config, *overrides]
        config = None

    # torch, which takes seconds to import
    from vit.runtime.processes import ProcessLostError
    from vit.training.run_directory import FIRST_BATCH_FILE
    from vit.training.signals import TrainingInterrupted

    try:
        result = start(config, overrides=overrides, output=output, show_plan=True)
    except (TrainingInterrupted, ProcessLostError) as stopped:
        echo(str(stopped), err=True)
        raise typer.Exit(REQUEUE) from None

    if start.keywords["dry_run"]:
        echo(f"one batch as the model gets it: {output / FIRST_BATCH_FILE}", err=True)
    # Only the first of the processes that torchrun starts writes to the user.
    elif os.environ.get("RANK", "0") == "0":
        message = f"{result.steps:,} steps in {result.seconds:.0f} s"
        count = result.num_validation
        if result.best_top1 is not None:
            right = round(result.best_top1 * count)
            percent = format_percent(result.best_top1, count)
            message += f": {right:,} of {count:,} validation images correct ({percent})"
        if result.best_map is not None:
            average = format_percent(result.best_map, count)
            message += f": mean average precision {average} on {count:,} images"
        echo(f"{message}; model: {result.model_path}", err=True)
        echo(f"next: vit evaluate {output}; vit explain {output}", err=True)


COMMAND = Command(
    run=train,
    function="train",
    python_only=(
        "show_plan",
        "transform",
        "dataset",
        "class_names",
        "model",
        "loss",
        "callbacks",
    ),
)
