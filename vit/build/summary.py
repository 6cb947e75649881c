"""What a training run will do and cost, before it starts."""

import math
from pathlib import Path

import torch

from vit.build.attention_images import undo_normalization
from vit.build.run import Run
from vit.model.presets import compute_flops
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import describe_device
from vit.runtime.files import write_atomically


def summarize_run(run: Run) -> dict[str, str]:
    """The run's images, model, device, length and estimated time, as text by name."""
    plan, data, steps = run.trainer.plan, run.data, len(run.train_loader)
    model = f"{sum(p.numel() for p in run.model.parameters()):,} parameters"
    if isinstance(run.model, VisionTransformer):  # backward costs twice the forward
        flops = 3 * compute_flops(run.model.architecture) * steps * plan.batch_size
        model += f", {flops / 1e12:,.2f} TFLOP an epoch"
    images = f"{len(data.train):,} training"
    if data.validation is not None:
        images += f", {len(data.validation):,} validation"
    if unreadable := len(list_unreadable(run)):
        images += f", {unreadable} unreadable and skipped"
    return {
        "data": f"{data.train.name}: {images}; {len(data.train.class_names)} classes",
        "splits": "; ".join(data.split_descriptions),
        "fingerprint": data.train.fingerprint[:16],
        "pipeline": f"{data.pipeline} ({data.pipeline_reason})",
        "class balance": f"{data.class_balance} ({data.class_balance_reason})",
        "model": model,
        "device": f"{describe_device(run.trainer.step.device)}, {torch.get_num_threads()} threads, "
        f"{run.trainer.step.precision}, "
        f"{'compiled' if run.is_compiled else 'not compiled'}",
        "run": f"{plan.epochs} epochs of {steps} steps of {plan.batch_size} images, {plan.total_steps:,} steps in all",
        **run.choices,
        "estimate": _estimate(run),
    }


def list_unreadable(run: Run) -> list[str]:
    """One sentence for each image that could not be read."""
    splits = [split for split in (run.data.train, run.data.validation) if split is not None]
    return [f"skipped {data.split} image {name}: {reason}" for data in splits for name, reason in data.unreadable]


def draw_batch(run: Run, path: Path) -> None:
    """The first training batch, augmented as the model gets it, as one picture of up to 64 images."""
    from torchvision.utils import save_image

    batch = next(iter(run.train_loader.epoch(0)))
    pictures = undo_normalization(batch.images[:64], run.data.preprocess)
    write_atomically(path, lambda temporary: save_image(pictures, temporary, format="png", nrow=8))


def _estimate(run: Run) -> str:
    """Time and memory; a step's time is taken as proportional to its pixels."""
    if run.step_cost is None:
        return "none for a sharded model"
    plan, progress = run.trainer.plan, run.trainer.progress
    full = math.prod(run.data.preprocess.image_size)
    sizes = [plan.image_size(epoch) for epoch in range(progress.epoch, plan.epochs)]
    fraction = sum(math.prod(size) / full if size else 1 for size in sizes) / max(len(sizes), 1)
    minutes = fraction * run.step_cost.seconds * (plan.total_steps - progress.step) / 60
    return f"{minutes:.1f} minutes, {run.step_cost.memory_bytes / 2**20:,.0f} MiB beside the images"
