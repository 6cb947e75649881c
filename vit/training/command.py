"""`vit train`: from a configuration, or images alone, to a model file that needs nothing else."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import typer

from vit.model.find_file import list_pretrained
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
    architecture: str | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    image_size: int | None = None,
    device: str | None = None,
    seed: int | None = None,
) -> None:
    """Train a model, on images alone or by a configuration.

    Ctrl-C saves and stops (exit code 75); --resume continues.

    Args:
        config: Images (a folder, table, shards or data set), a YAML file or a recipe.
        overrides: Changes of the configuration: key.path=value.
        output: Directory for the results.
        architecture: A preset such as vit_small_patch16_224, or weights as for --init.
        epochs: Passes over the training images (train.epochs).
        batch_size: Images in a step (train.batch_size).
        image_size: Side of the model's input in pixels (data.image_size).
        device: auto, cpu, cuda, cuda:N or mps (train.device).
        seed: Seed of weights, order and augmentation (train.seed).
    """
    keys = {
        "model.preset": architecture,
        "train.epochs": epochs,
        "train.batch_size": batch_size,
        "data.image_size": image_size,
        "train.device": device,
        "train.seed": seed,
    }
    if architecture is not None and _names_weights(architecture):
        if start.keywords["init"] is not None:
            raise ValueError(f"--model {architecture} and --init name two models; give one of them")
        start.keywords["init"] = architecture
        del keys["model.preset"]
    # an override that says the same as an option wins
    listed = [f"{key}={json.dumps(value)}" for key, value in keys.items() if value is not None]
    # `vit train --resume train.epochs=3`: the first argument is an override already
    key, equals, _ = (config or "").partition("=")
    # An address may have parameters.
    if config is not None and equals and "://" not in key and not Path(config).exists():
        listed.append(config)
        config = None

    # torch, which takes seconds to import
    from vit.runtime.processes import ProcessLostError
    from vit.training.run_directory import FIRST_BATCH_FILE
    from vit.training.signals import TrainingInterrupted

    try:
        result = start(
            config, overrides=[*listed, *(overrides or [])], output=output, show_plan=True
        )
    except (TrainingInterrupted, ProcessLostError) as stopped:
        echo(str(stopped), err=True)
        raise typer.Exit(REQUEUE) from None

    if start.keywords["dry_run"]:
        echo(f"one batch as the model gets it: {output / FIRST_BATCH_FILE}", err=True)
    # Only the first of the processes that torchrun starts writes to the user.
    elif os.environ.get("RANK", "0") == "0":
        message = "linear probe only"
        if result.steps:
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


def _names_weights(model: str) -> bool:
    """Tell if --model names weights. Otherwise it is a preset."""
    return ":" in model or model in list_pretrained() or Path(model).exists()


COMMAND = Command(
    run=train,
    function="train",
    flags={"architecture": "--model"},
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
