"""`vit train`: from a configuration, or images alone, to a model file that needs nothing else."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from vit.runtime.command import Command
from vit.runtime.console import echo
from vit.runtime.patterns import check_pattern
from vit.runtime.plugins import list_plugins

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

    Ctrl-C saves and stops (exit code 75); --resume continues, to the same result bit for bit
    (on a GPU with train.deterministic=true, on the same kind of card and torch).

    Args:
        config: Images (a folder, table, shards or data set), or a YAML file or recipe; with
            --resume the run's own.
        overrides: Changes of the configuration, key.path=value ….
        output: Directory for the results.
    """
    # a wrong expression is refused before torch is imported
    for name in ("group_by", "label_by"):
        pattern = start.keywords[name]
        # a number is the level of a folder
        if isinstance(pattern, str) and not pattern.isdecimal():
            check_pattern(pattern, name=f"--{name.replace('_', '-')}")

    # `vit train --resume train.epochs=3`: the first argument is an override already
    key, equals, _ = (config or "").partition("=")
    # An address may have parameters.
    is_override = equals and "://" not in key and not Path(config or "").exists()
    if config is not None and is_override:
        overrides = [config, *(overrides or [])]
        config = None
    _check(start, config, overrides or [], output=output)

    # torch, which takes seconds to import
    from vit.runtime.processes import ProcessLostError
    from vit.training.signals import TrainingInterrupted

    try:
        result = start(config, overrides=overrides or [], output=output, show_plan=True)
    except (TrainingInterrupted, ProcessLostError) as stopped:
        echo(str(stopped), err=True)
        raise typer.Exit(REQUEUE) from None

    if start.keywords["dry_run"]:
        echo(f"one batch as the model gets it: {output / 'dry_run.png'}", err=True)
    # Only the first of the processes that torchrun starts writes to the user.
    elif os.environ.get("RANK", "0") == "0":
        message = f"{result.steps} steps in {result.seconds:.0f} s; model: {result.model_path}"
        if result.best_top1 is not None:
            message += f", validation top-1 {result.best_top1:.2%}"
        echo(message, err=True)


def _check(
    start: partial[Any], config: str | None, overrides: Sequence[str], *, output: Path
) -> None:
    """Raise the error that the arguments would raise later, after torch is imported."""
    # numpy and pydantic, which `vit --help` does without
    from vit.data.open import check_place
    from vit.training.resolve import resolve_arguments

    values = start.keywords
    names = ("init", "minutes", "group_by", "folds", "resume", "overwrite")
    options = {name: values[name] for name in names}
    labels = {name: values[name] for name in ("label_by", "path_column", "label_column")}
    _, all_overrides, resolved = resolve_arguments(
        config, output=output, overrides=overrides, labels=labels, **options
    )
    if config is not None and resolved is None:
        # A key of `data` may say how the images are found.
        says_how = any(override.startswith("data.") for override in all_overrides)
        check_place(config, with_classes=not says_how)


COMMAND = Command(
    run=train,
    function="train",
    sections=lambda: {"Data sets of other packages": list_plugins("vit.register_source")},
    python_only=(
        "show_plan",
        "transform",
        "dataset",
        "class_names",
        "model",
        "loss",
        "class_weights",
        "callbacks",
    ),
)
