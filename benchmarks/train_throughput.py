"""Measure images a second in training, beside timm's model, on the same images and architecture.

    python benchmarks/train_throughput.py ROOT --output benchmarks/results

ROOT is an image folder with a train/ split (for the published result: CIFAR-10 as JPEG files). Each variant runs in a
process of its own, they take turns round by round, and a result is the median over the rounds:

    plain      timm's model, fused AdamW, torchvision's transforms (random crop with padding, flip, normalise) and a
               DataLoader with two workers, 12 on a GPU
    compiled   the same, with torch.compile
    resident   timm's model on batches in the device's memory, without decoding or augmentation (on request)
    engine     `vit.train` with the same architecture, optimizer and augmentation

All compute in the precision that `vit train` chooses. The result is written after each variant.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

ARCHITECTURE = {"embed_dim": 192, "depth": 9, "num_heads": 3, "patch_size": 4}
IMAGE_SIZE = 32
BATCH_SIZE = 256
WARM_STEPS = 4
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.05
VARIANTS = ("plain", "compiled", "engine")
NAME = "train-throughput"


class Clock:
    """Counts steps from the end of the warm-up to the end of the time."""

    def __init__(self, device: str, *, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.steps, self.start, self.end = 0, 0.0, 0.0

    def tick(self) -> bool:
        """Count a step; return True when the time is over: the end of a run is no step."""
        self.steps += 1
        if self.steps == WARM_STEPS:
            self.start = self._read()
        if self.steps <= WARM_STEPS or time.perf_counter() - self.start < self.seconds:
            return False
        self.end = self._read()
        return True

    def compute_rate(self) -> float:
        """Return the images a second since the warm-up."""
        return (self.steps - WARM_STEPS) * BATCH_SIZE / (self.end - self.start)

    def _read(self) -> float:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def build_loader(images: Any, device: Any) -> Any:
    """Return the DataLoader of a plain loop; more workers would slow training on two CPU cores."""
    from torch.utils.data import DataLoader

    return DataLoader(
        images,
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=2 if device.type == "cpu" else min(12, os.cpu_count() or 1),
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )


def run_timm(root: Path, clock: Clock, *, variant: str) -> float:
    """Train timm's model in a plain loop."""
    import timm
    import torch
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    from vit.runtime.device import autocast, choose_precision

    device = torch.device(clock.device)
    steps = [
        transforms.RandomCrop(IMAGE_SIZE, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ]
    images = ImageFolder(root / "train", transforms.Compose(steps))
    batches = build_loader(images, device)
    if variant == "resident":
        batches = cycle([[part.to(device) for part in next(iter(batches))]])
    shape = {"img_size": IMAGE_SIZE, "num_classes": len(images.classes), **ARCHITECTURE}
    model = timm.models.VisionTransformer(**shape).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )
    forward: Callable[..., Any] = torch.compile(model) if variant == "compiled" else model
    while True:
        for batch, labels in batches:
            with autocast(device, choose_precision("auto", device)):
                outputs = forward(batch.to(device, non_blocking=True))
                loss = torch.nn.functional.cross_entropy(outputs, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if clock.tick():
                return clock.compute_rate()


def run_engine(root: Path, clock: Clock, *, folder: Path) -> float:
    """Train by `vit.train`, which a callback ends when the time is over."""
    import vit

    class Stop(vit.Observer):
        def on_step(self, metrics: dict[str, Any]) -> bool:
            return clock.tick()

    overrides = [f"model.{name}={value}" for name, value in ARCHITECTURE.items()]
    overrides += ["optimizer.name=adamw", f"optimizer.lr={LEARNING_RATE}"]
    overrides += [f"optimizer.weight_decay={WEIGHT_DECAY}", f"data.image_size={IMAGE_SIZE}"]
    overrides += ["augment.crop_padding=4", "augment.flip=random", f"data.root={root}"]
    overrides += [f"train.batch_size={BATCH_SIZE}", "train.epochs=100"]
    overrides += ["data.name=folder", f"train.device={clock.device}"]
    vit.train({}, output=folder / "run", overrides=overrides, callbacks=[Stop()])
    return clock.compute_rate()


def start_variant(variant: str, options: argparse.Namespace, *, cache: Path) -> float:
    """Run a variant in a process of its own; its last line of output is its rate."""
    environment = os.environ | {"VIT_CACHE": str(cache / "vit")}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "compiled" / variant))
    command = [sys.executable, __file__, str(options.root), "--one", variant]
    command += ["--device", options.device, "--seconds", str(options.seconds)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def summarise(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median rate of each variant, and the ratios of ours to the others."""
    variants = {}
    for name in rounds[0]:
        rates = [found[name] for found in rounds if name in found]
        variants[name] = {"images_per_second": statistics.median(rates), "rounds": rates}
    medians = {name: found["images_per_second"] for name, found in variants.items()}
    ours = medians.pop("engine", None)
    ratios = {f"engine / {name}": ours / rate for name, rate in medians.items()} if ours else {}
    return {"variants": variants, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=[*VARIANTS, "resident"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="a variant, after warm-up")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=f"folder of {NAME}-<machine>.json")
    options = parser.parse_args()
    if options.one:
        clock = Clock(options.device, seconds=options.seconds)
        if options.one == "engine":
            with tempfile.TemporaryDirectory() as folder:
                print(run_engine(options.root, clock, folder=Path(folder)))
        else:
            print(run_timm(options.root, clock, variant=options.one))
        return
    from conditions import describe_conditions, write_result

    images = f"{IMAGE_SIZE} px, batch {BATCH_SIZE}, {ARCHITECTURE}"
    result: dict[str, Any] = {"machine": describe_conditions(options.device), "images": images}
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(options.rounds):
            rounds.append({})
            for variant in options.variants:
                rounds[-1][variant] = start_variant(variant, options, cache=Path(cache))
                print(f"round {len(rounds)}, {variant}: {rounds[-1][variant]}", flush=True)
                result |= summarise(rounds)
                if options.output:
                    write_result(options.output, NAME, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
