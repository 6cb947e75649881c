"""Which stem, augmentation and settings suit Fashion-MNIST in few epochs: one seed of many trials.

    python research/fashion_mnist_trials.py ROOT --trials TRIALS.json --output benchmarks/results

ROOT holds idx files in which the official training images are divided at random (numpy's generator
of seed 0) into 50,000 "train" and 10,000 "t10k" images, so that the official test images choose
nothing. Each trial is {"name", "set", "stem"}: changes of the recipe fashion_mnist/cpu as it was
at commit 81151c8, and the layers of its stem: cN a 3×3 convolution of N channels, SN one of 4×4 and
stride 2, a ReLU, p 3×3 max pooling of stride 2, r a residual 3×3 convolution. The trials of the
result file ran on one H200, eight and then four at a time, beside tests.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import describe_conditions, write_result
from torch import Tensor, nn

import vit
import vit.model.patch_embed as patch_embed
from vit.model.stem import ResidualConv

NAME = "fashion-mnist-trials"
RECIPE = "fashion_mnist/cpu"
SETTINGS = [
    "data.name=folder",
    "data.validation_fraction=0.02",
    "train.max_training_features=0",
    "train.evaluate_every_epochs=1000",
]


def build_layers(words: str, in_chans: int) -> nn.Sequential:
    """The stem of a trial."""
    layers: list[nn.Module] = []
    for word in words.split():
        if word[0] in "cS":
            width = int(word[1:])
            strided = word[0] == "S"
            kernel, stride = (4, 2) if strided else (3, 1)
            layers.append(nn.Conv2d(in_chans, width, kernel, stride, padding=1, bias=False))
            in_chans = width
        elif word == "p":
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        elif word == "a":
            layers.append(nn.ReLU(inplace=True))
        elif word == "r":
            layers.append(ResidualConv(in_chans))
    return nn.Sequential(*layers)


@torch.inference_mode()
def measure_top1(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Of the images, and of the mean logits of each and its mirror image."""
    plain = mirrored = 0
    for batch, targets in zip(images.split(1000), labels.split(1000), strict=True):
        logits = model(batch).float()
        both = logits + model(batch.flip(-1)).float()
        plain += int((logits.argmax(dim=1) == targets).sum())
        mirrored += int((both.argmax(dim=1) == targets).sum())
    return plain / len(images), mirrored / len(images)


def run_trial(root: Path, trial: dict[str, Any], device: str) -> dict[str, Any]:
    original = patch_embed.build_stem
    if trial.get("stem"):
        patch_embed.build_stem = lambda stem, in_chans, *sizes: (  # type: ignore[assignment]
            build_layers(trial["stem"], in_chans),
            nn.Identity(),
        )
    overrides = [*SETTINGS, f"data.root={root}", f"train.device={device}", *trial.get("set", [])]
    try:
        with tempfile.TemporaryDirectory() as directory:
            run = vit.train(RECIPE, output=Path(directory) / "run", overrides=overrides)
            bundle = run.bundle
    finally:
        patch_embed.build_stem = original
    pixels = np.fromfile(root / "t10k-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 28, 28, 1)
    labels = np.fromfile(root / "t10k-labels-idx1-ubyte", np.uint8)[8:].astype(np.int64)
    images = bundle.preprocess.normalize(torch.from_numpy(np.repeat(pixels, 3, axis=3)).to(device))
    with torch.autocast(device, torch.bfloat16):
        top1, mirrored = measure_top1(
            bundle.model.to(device), images, torch.from_numpy(labels).to(device)
        )
    num_parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    return trial | {"top1": top1, "mirrored": mirrored, "parameters": num_parameters}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path)
    parser.add_argument("--trials", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    trials = []
    for trial in json.loads(options.trials.read_text()):
        trials.append(run_trial(options.root, trial, options.device))
        result = {"machine": describe_conditions(options.device), "trials": trials}
        write_result(options.output, NAME, result)


if __name__ == "__main__":
    main()
