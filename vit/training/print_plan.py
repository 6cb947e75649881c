"""The plan of a run for the user, before it starts: what it will do, and what may go wrong."""

import math

import torch

from vit.runtime.console import build_console, build_table
from vit.runtime.device import describe_device
from vit.training.run import Run


def print_plan(run: Run, choices: dict[str, str], *, resumed: bool) -> None:
    """Show what a run will do, its unreadable images and the notes on its images on standard error;
    no notes of a run that is `resumed`. `choices` are the reasons of what was chosen, by name."""
    console = build_console(stderr=True)
    rows = _summarize_run(run) | choices
    console.print(build_table(rows.items(), num_text_columns=2))
    train = run.data.train
    for dataset in filter(None, (train, run.data.validation)):
        for name, reason in dataset.unreadable:
            console.print(f"skipped {dataset.split} image {name}: {reason}", soft_wrap=True)
    if resumed:
        trainer, step = run.trainer, run.trainer.train_step
        console.print(
            f"resuming after step {trainer.progress.step} of {trainer.plan.total_steps}, at"
            f" {step.lr_factor(step.num_steps * step.pace):.0%} of the highest learning rate"
        )
        return
    for sentence in train.notes:
        console.print(f"warning: {sentence}", style="yellow", soft_wrap=True)


def _summarize_run(run: Run) -> dict[str, str]:
    """Describe the run's directory, images, model, device and length, as text by name."""
    plan = run.trainer.plan
    step = run.trainer.train_step
    data = run.data
    datasets = [data.train, *filter(None, [data.validation])]
    images = ", ".join(f"{len(dataset):,} {dataset.split}" for dataset in datasets)
    if num_unreadable := sum(len(dataset.unreadable) for dataset in datasets):
        images += f", {num_unreadable:,} unreadable"
    classes = "labels" if data.train.is_multilabel else "classes"
    length = "linear probe only"
    if plan.total_steps:
        epochs = math.ceil(plan.total_steps / plan.steps_per_epoch)
        length = (
            f"{epochs} epochs of {plan.steps_per_epoch} steps of {plan.batch_size} images,"
            f" {plan.total_steps:,} steps in all"
        )
    kind = type(step.module)
    num_parameters = sum(parameter.numel() for parameter in step.module.parameters())
    facts = {
        "output": str(run.trainer.directory),
        "data": f"{data.splits.title}: {images}; {len(data.train.class_names)} {classes}",
        "read as": "; ".join(data.splits.read),
        "splits": "; ".join(data.splits.describe_splits()),
        "model": (
            f"{kind.__name__} of {kind.__module__.partition('.')[0]}, {num_parameters:,} parameters"
        ),
        "device": (
            f"{describe_device(step.device)}, {torch.get_num_threads()} threads, {step.precision}"
        ),
        "run": length,
        "class balance": data.class_balance,
    }
    if run.probe is not None:
        facts["probe"] = run.probe.description
        if run.probe.curve is not None:
            facts["more photos"] = run.probe.curve["sentence"]
    return {name: text for name, text in facts.items() if text}
