"""The baseline of `time_to_accuracy.py`: timm's VisionTransformer in a plain training loop.

    python benchmarks/timm_baseline.py configs/cifar10/cpu.yaml data.name=folder data.root=ROOT --epochs 10

The model has the recipe's width, depth, heads and patch size. It is trained as timm's users do: a
DataLoader with 2 workers over the same training files, random crop with padding and flip by
torchvision, AdamW (learning rate 1e-3, weight decay 0.05) with a warm-up of an epoch, at most half
of the run, and cosine decay, label smoothing of 0.1, in the precision of `vit train` (bfloat16
autocast where the processor has it). It is validated on the same images after every epoch, and
tested once at the end. The last line of output is the result; with --output it is also written,
after every epoch, as timm-baseline-<machine>.json. On a GPU the DataLoader has 12 workers, or one
for each core if there are fewer.
"""

# ruff: noqa: E402 - imports are timed too
import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()  # of this process, but for the interpreter

import timm
import torch
from conditions import describe_conditions, write_result
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from vit.config import Config, load_config
from vit.data.dataset import ImageDataset
from vit.runtime.device import autocast, choose_device, choose_precision
from vit.training.data import build_dataset

NAME = "timm-baseline"
# on two CPU cores more of them would take time from the training
CPU_WORKERS = 2
MAX_GPU_WORKERS = 12
NORMALIZE = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class Files(Dataset[tuple[Any, int]]):
    """The files of a source as torchvision's ImageFolder would give them."""

    def __init__(self, source: ImageDataset, transform: Any) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Image.Image = self.source.image(index)
        return self.transform(image), int(self.source.labels[index])


def count_workers(device: torch.device) -> int:
    """Processes that decode images."""
    if device.type == "cpu":
        return CPU_WORKERS
    return min(MAX_GPU_WORKERS, os.cpu_count() or 1)


def build_loader(
    config: Config, source: ImageDataset, device: torch.device, *, training: bool = False
) -> DataLoader[tuple[Any, int]]:
    size = config.data.image_size
    assert isinstance(size, int)
    changes = [transforms.RandomCrop(size, padding=size // 8), transforms.RandomHorizontalFlip()]
    steps = [*(changes if training else []), transforms.ToTensor(), NORMALIZE]
    return DataLoader(
        Files(source, transforms.Compose(steps)),
        config.train.batch_size,
        shuffle=training,
        drop_last=training,
        num_workers=count_workers(device),
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )


def build_model(config: Config, num_classes: int) -> nn.Module:
    names = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    shape = {name: getattr(config.model, name) for name in names}
    return timm.models.VisionTransformer(
        img_size=config.data.image_size, num_classes=num_classes, **shape
    )


def train(
    config: Config,
    device: torch.device,
    *,
    seed: int,
    epochs: int,
    seconds: float,
    report: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Train for `epochs` or until `seconds` are over, and test; `report` gets what is known after
    every epoch."""
    torch.manual_seed(seed)
    dataset = build_dataset(config)
    loader = build_loader(config, dataset.split("train"), device, training=True)
    validation = build_loader(config, dataset.split("validation"), device)
    model = build_model(config, len(dataset.split("train").class_names)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    steps = len(loader) * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=steps, pct_start=min(1 / epochs, 0.5), cycle_momentum=False
    )
    curve: list[dict[str, float]] = []
    for epoch in range(1, epochs + 1):
        model.train()
        for images, labels in loader:
            images, labels = (
                images.to(device, non_blocking=True),
                labels.to(device, non_blocking=True),
            )
            with autocast(device, choose_precision("auto", device)):
                loss = nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        top1 = compute_top1(model, validation, device)
        curve.append(
            {"seconds": round(time.perf_counter() - STARTED, 1), "epoch": epoch, "top1": top1}
        )
        print(f"baseline: {curve[-1]}", file=sys.stderr, flush=True)
        report({"seed": seed, "planned_epochs": epochs, "curve": curve})
        if curve[-1]["seconds"] > seconds:
            break
    elapsed = round(time.perf_counter() - STARTED, 1)
    return {
        "seed": seed,
        "seconds": elapsed,
        "epochs": len(curve),
        "planned_epochs": epochs,
        "test_top1": compute_top1(
            model, build_loader(config, dataset.split("test"), device), device
        ),
        "curve": curve,
    }


@torch.no_grad()
def compute_top1(model: nn.Module, loader: Any, device: torch.device) -> float:
    """Top-1 accuracy, 0 to 1."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        with autocast(device, choose_precision("auto", device)):
            predicted = model(images.to(device)).argmax(dim=1).cpu()
        correct, total = correct + int((predicted == labels).sum()), total + len(labels)
    return correct / total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop it after an epoch"
    )
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_intermixed_args()
    config = load_config(options.recipe, options.overrides)
    device = choose_device(config.train.device)
    machine = describe_conditions(device)

    def report(run: dict[str, Any]) -> None:
        if options.output:
            write_result(options.output, NAME, {"machine": machine, "run": run})

    run = train(
        config,
        device,
        seed=options.seed,
        epochs=options.epochs,
        seconds=options.seconds,
        report=report,
    )
    report(run)
    print(json.dumps(run))


if __name__ == "__main__":
    main()
