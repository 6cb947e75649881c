"""The plan of a run for the user, before it starts: what it will do, and what may go wrong."""

import math

import torch

from vit.data.label_sets import describe_label_sets
from vit.data.statistics import (
    MAX_RATIO,
    compute_class_ratio,
    measure_shorter_side,
)
from vit.runtime.console import build_console, build_table
from vit.runtime.device import describe_device
from vit.training.run import Run

_FEW_STEPS = 200
# Limits of the images' shorter side, in units of data.image_size.
_MIN_SCALE = 0.5
_MAX_SCALE = 8
# Images whose sizes are read.
_SAMPLE = 200
# Rows of the plan that are shown with --verbose.
_FOR_FEW = ("pipeline", "class balance", "batch")


def print_plan(run: Run, choices: dict[str, str], *, resumed: bool, verbose: bool = False) -> None:
    """Show what a run will do, its unreadable images and its warnings on standard error.

    Args:
        run: The run, before it starts.
        choices: Values that were chosen for the images, with reasons, by name.
        resumed: The run continues; then there are no warnings.
        verbose: Show also what needs nobody's attention in most runs.
    """
    console = build_console(stderr=True)
    rows = {"output": str(run.trainer.checkpoints.directory.parent)}
    rows |= summarize_run(run) | choices
    if not verbose:
        # Balanced classes, and decoded pixels of many GB somewhere, concern everybody.
        shown = {"class balance"} if run.data.class_balance != "none" else set()
        if run.data.stored is not None:
            shown.add("pipeline")
        rows = {name: rows[name] for name in rows if name not in _FOR_FEW or name in shown}
    console.print(build_table(rows.items(), num_text_columns=2))
    for dataset in (run.data.train, run.data.validation):
        if dataset is None:
            continue
        for name, reason in dataset.unreadable:
            console.print(f"skipped {dataset.split} image {name}: {reason}", soft_wrap=True)
    if resumed:
        step = run.trainer.progress.step
        console.print(f"resuming after step {step} of {run.trainer.plan.total_steps}")
    else:
        for sentence in list_warnings(run):
            console.print(f"warning: {sentence}", style="yellow", soft_wrap=True)


def summarize_run(run: Run) -> dict[str, str]:
    """Describe the run's images, model, device and length, as text by name."""
    plan = run.trainer.plan
    train_step = run.trainer.train_step
    data = run.data

    images = f"{len(data.train):,} training"
    num_unreadable = len(data.train.unreadable)
    if data.validation is not None:
        images += f", {len(data.validation):,} validation"
        num_unreadable += len(data.validation.unreadable)
    num_parameters = sum(parameter.numel() for parameter in train_step.module.parameters())
    device = f"{describe_device(train_step.device)}, {torch.get_num_threads()} threads"
    epochs = math.ceil(plan.total_steps / plan.steps_per_epoch)
    length = f"{epochs} epochs of {plan.steps_per_epoch} steps of {plan.batch_size} images"
    length += f", {plan.total_steps:,} steps in all"
    if not plan.total_steps:
        length = "linear probe only"
    classes = f"{len(data.train.class_names)} classes"
    if data.train.is_multilabel:
        classes = describe_label_sets(data.train.labels)
    values = ""
    if data.preprocess.value_range is not None:
        low, high = data.preprocess.value_range
        values = f"{low:g} to {high:g} become black to white (data.value_range)"
    facts = {
        "data": f"{data.splits.title}: {images}; {classes}",
        "files": data.splits.describe_files(num_unreadable),
        "read as": "; ".join(data.splits.images.listing.read),
        "splits": "; ".join(data.splits.describe_splits()),
        data.train.class_word: data.splits.describe_classes(),
        "pipeline": f"{run.config.data.pipeline} ({data.pipeline_reason})",
        "values": values,
        "class balance": f"{data.class_balance} ({data.class_balance_reason})",
        "model": f"{num_parameters:,} parameters",
        "device": f"{device}, {train_step.precision}",
        "run": length,
    }
    if run.probe is not None:
        facts["probe"] = run.probe.description
        if run.probe.curve is not None:
            facts["more photos"] = run.probe.curve.sentence
    # Other data sets have no files, most need no guesses, and images of 8 bits need no range.
    optional = ("files", "read as", "values")
    return {name: text for name, text in facts.items() if text or name not in optional}


def list_warnings(run: Run) -> list[str]:
    """List what may go wrong with the run, one sentence each."""
    data = run.data
    warnings = list(data.train.notes)

    total_steps = run.trainer.plan.total_steps
    # A model that starts from a probe is good already.
    if total_steps < _FEW_STEPS and not run.trainer.keeps_first_model:
        warnings.append(
            f"the run has {total_steps} steps, and fewer than {_FEW_STEPS} rarely train well: "
            "raise train.epochs or lower train.batch_size"
        )

    if compute_class_ratio(data.train.labels) > MAX_RATIO and data.class_balance == "none":
        counts = data.train.class_counts
        names = data.train.class_names
        warnings.append(
            f"{data.train.class_word} of more than {MAX_RATIO}:1: {names[counts.argmax()]} has {counts.max():,} "
            f"training images and {names[counts.argmin()]} has {counts.min():,}; "
            "train.class_balance=auto balances them"
        )

    # The sizes of the files count, not those of the decoded images.
    image_size = min(data.preprocess.image_size)
    side = measure_shorter_side(data.splits.split("train"), count=_SAMPLE)
    sizes = f"({side:.0f} px) than data.image_size {image_size}"
    if side < _MIN_SCALE * image_size:
        warnings.append(f"the images are much smaller {sizes}; a smaller one trains faster")
    if side > _MAX_SCALE * image_size:
        warnings.append(f"the images are much larger {sizes}; a larger one shows more of them")
    return warnings


def warn_of_guessing(run: Run) -> str | None:
    """Return a warning where the best model is no better than one that always answers the most
    frequent class, or is right twice as often as by chance."""
    validation = run.data.validation
    top1 = run.trainer.progress.best.top1
    if validation is None or validation.is_multilabel or top1 < 0:
        return None
    most = float(validation.class_counts.max()) / len(validation)
    if top1 > max(most, min(2 / len(validation.class_names), 0.5)):
        return None
    advice = "train longer, or look at the labels (vit audit)"
    if run.config.model.init is None:
        advice += ", or start from pretrained weights (--model timm:NAME)"
    return f"warning: the best model is no better than guessing; {advice}"
