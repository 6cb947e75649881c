"""The plan of a run for the user, before it starts: what it will do, and what may go wrong."""

import math

import torch

from vit.data.label_sets import describe_label_sets
from vit.data.statistics import MAX_RATIO, compute_class_ratio
from vit.runtime.console import build_console, build_table
from vit.runtime.device import describe_device
from vit.training.run import Run


def print_plan(run: Run, choices: dict[str, str], *, resumed: bool) -> None:
    """Show what a run will do, its unreadable images and its warnings on standard error.

    Args:
        run: The run, before it starts.
        choices: Values that were chosen for the images, with reasons, by name.
        resumed: The run continues; then there are no warnings.
    """
    console = build_console(stderr=True)
    rows = {"output": str(run.trainer.checkpoints.directory.parent)}
    rows |= summarize_run(run) | choices
    console.print(build_table(rows.items(), num_text_columns=2))
    for dataset in filter(None, (run.data.train, run.data.validation)):
        for name, reason in dataset.unreadable:
            console.print(f"skipped {dataset.split} image {name}: {reason}", soft_wrap=True)
    if resumed:
        step = run.trainer.progress.step
        console.print(f"resuming after step {step} of {run.trainer.plan.total_steps}")
        return
    for sentence in list_warnings(run):
        console.print(f"warning: {sentence}", style="yellow", soft_wrap=True)


def summarize_run(run: Run) -> dict[str, str]:
    """Describe the run's images, model, device and length, as text by name."""
    plan = run.trainer.plan
    step = run.trainer.train_step
    data = run.data
    images = f"{len(data.train):,} training"
    num_unreadable = len(data.train.unreadable)
    if data.validation is not None:
        images += f", {len(data.validation):,} validation"
        num_unreadable += len(data.validation.unreadable)
    images += f", {num_unreadable:,} unreadable" * (num_unreadable > 0)
    classes = f"{len(data.train.class_names)} classes"
    if data.train.is_multilabel:
        classes = describe_label_sets(data.train.labels)
    length = "linear probe only"
    if plan.total_steps:
        epochs = math.ceil(plan.total_steps / plan.steps_per_epoch)
        length = (
            f"{epochs} epochs of {plan.steps_per_epoch} steps of {plan.batch_size} images,"
            f" {plan.total_steps:,} steps in all"
        )
    num_parameters = sum(parameter.numel() for parameter in step.module.parameters())
    facts = {
        "data": f"{data.splits.title}: {images}; {classes}",
        "read as": "; ".join(data.splits.images.listing.read),
        "splits": "; ".join(data.splits.describe_splits()),
        data.train.class_word: data.splits.describe_classes(),
        "model": f"{num_parameters:,} parameters",
        "device": f"{describe_device(step.device)}, {torch.get_num_threads()} threads,"
        f" {step.precision}",
        "run": length,
    }
    # Decoded pixels of many GB somewhere, and balanced classes, concern everybody.
    if data.stored is not None:
        assert data.stored.pixels is not None
        size = f"{data.stored.pixels.nbytes / 1e9:,.1f} GB of pixels"
        facts["pipeline"] = f"cached: {size} in {data.splits.cache_dir}"
    if data.preprocess.value_range is not None:
        low, high = data.preprocess.value_range
        facts["values"] = f"{low:g} to {high:g} become black to white (data.value_range)"
    if data.class_balance != "none":
        facts["class balance"] = f"{data.class_balance} ({data.class_balance_reason})"
    if run.probe is not None:
        facts["probe"] = run.probe.description
        if run.probe.curve is not None:
            facts["more photos"] = run.probe.curve.sentence
    return {name: text for name, text in facts.items() if text}


def list_warnings(run: Run) -> list[str]:
    """List what may go wrong with the run, one sentence each."""
    data = run.data
    train = data.train
    warnings = list(train.notes)
    if compute_class_ratio(train.labels) > MAX_RATIO and data.class_balance == "none":
        counts, names = train.class_counts, train.class_names
        warnings.append(
            f"{train.class_word} of more than {MAX_RATIO}:1: {names[counts.argmax()]} has"
            f" {counts.max():,} training images and {names[counts.argmin()]} has"
            f" {counts.min():,}; train.class_balance=auto balances them"
        )
    return warnings
