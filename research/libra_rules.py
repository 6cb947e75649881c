"""What LibraGrad's rules for denominators are worth, and the maps of one pass beside libra-removal.

    PYTHONPATH=.:benchmarks:research python research/libra_rules.py /data/imagenette/val \
        --before /path/to/a/tree/without/them --images 32 --output benchmarks/results

The head of the packaged model is replaced by 20 · cos(features, class direction), the rows of its
own classifier. Of photos that it classifies correctly, the symmetric relevance gain of the class's
probability is measured with tokens dropped and with the mean fill, for maps of this tree and, in
another process, of the tree before. Differences are paired, with 95 % bootstrap intervals over the
images. The methods of one pass are compared with libra-removal on the model as it is.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vit.analysis.faithfulness.benchmark import KEPT
from vit.analysis.faithfulness.map_metrics import estimate, find_order
from vit.bundle import Bundle, open_model
from vit.explanation.checks.token_ablation import (
    FRACTIONS,
    area_under,
    build_probability,
    build_removal,
    deletion_curve,
)
from vit.explanation.methods.maps import compute_maps
from vit.explanation.targets import CLASS

METHODS = ("libra-fullgrad", "libra-gae", "libra-input-x-gradient", "libra-removal")
PIXELS = "libra-fullgrad-pixels"
OPERATORS = {"tokens dropped": "auto", "mean fill": "mean"}


class CosineHead(nn.Module):
    """20 · cos(features, class direction)."""

    def __init__(self, directions: Tensor) -> None:
        super().__init__()
        self.directions = nn.Parameter(directions.detach().clone())

    def forward(self, features: Tensor) -> Tensor:
        return 20 * F.normalize(features, dim=-1) @ F.normalize(self.directions, dim=-1).T


def read_images(bundle: Bundle, folder: Path, count: int) -> tuple[Tensor, Tensor]:
    """Images that are classified correctly, from each class in turn, and their classes."""
    files = [sorted(path.iterdir()) for path in sorted(folder.iterdir())]
    images, classes = [], []
    for number in range(min(map(len, files))):
        for label, paths in enumerate(files):
            with Image.open(paths[number]) as photo:
                pixels = torch.from_numpy(bundle.preprocess.to_uint8(photo.convert("RGB")))
            image = bundle.preprocess.normalize(pixels[None])
            with torch.no_grad():
                if int(bundle.model(image).argmax()) != label:
                    continue
            images.append(image)
            classes.append(label)
            if len(images) == count:
                return torch.cat(images), torch.tensor(classes)
    raise SystemExit(f"fewer than {count} images of {folder} are classified correctly")


def measure_gains(
    bundle: Bundle, folder: Path, count: int, methods: tuple[str, ...]
) -> dict[str, dict[str, list[float]]]:
    """The symmetric relevance gain of each image, by operator and method."""
    images, classes = read_images(bundle, folder, count)
    target = replace(CLASS, choose=lambda logits: classes[:, None])
    _, _, maps = compute_maps(bundle.model, images, methods=methods, target=target, verify=False)
    gains: dict[str, dict[str, list[float]]] = {}
    for operator, fill in OPERATORS.items():
        grid = maps[0].values.shape[-2:]
        kept = build_removal(
            bundle.model, images, grid=grid, fill=fill, precision="float32", batch_size=len(images)
        )
        predict = build_probability(kept, classes, target=CLASS)
        gains[operator] = {}
        for one in maps:
            order = find_order(one.values[:, 0])
            deletion = area_under(deletion_curve(predict, order), fractions=FRACTIONS)
            removed_first = [1 - fraction for fraction in KEPT]
            insertion = deletion_curve(predict, order.flip(1), fractions=removed_first)
            gain = area_under(insertion, fractions=KEPT) - deletion
            gains[operator][one.method.name] = gain.tolist()
    return gains


def compare(values: dict[str, list[float]], base: dict[str, list[float]]) -> dict[str, object]:
    """The mean of each method, of its base, and their paired difference."""
    table: dict[str, object] = {}
    for name, gains in values.items():
        columns = {"mean": np.array(gains), "base": np.array(base[name])}
        columns["difference"] = columns["mean"] - columns["base"]
        found = estimate(columns)
        difference = found["difference"]
        table[name] = {
            "mean": round(found["mean"].mean, 4),
            "base": round(found["base"].mean, 4),
            "difference": [round(getattr(difference, name), 4) for name in ("mean", "low", "high")],
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # faster than two on a machine that others use, too
    bundle = open_model("imagenette", device="cpu")
    head = bundle.model.head
    plain = {}
    if arguments.before:
        plain = measure_gains(bundle, arguments.folder, arguments.images, (*METHODS, PIXELS))
    bundle.model.head = CosineHead(head.weight)
    cosine = measure_gains(bundle, arguments.folder, arguments.images, METHODS)
    if not arguments.before:
        print(json.dumps(cosine))
        return

    from conditions import describe_conditions, write_result

    command = [sys.executable, __file__, str(arguments.folder), "--images", str(arguments.images)]
    before = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(arguments.before)},
        capture_output=True,
        text=True,
        check=True,
    )
    base = json.loads(before.stdout.splitlines()[-1])
    result = {
        "machine": describe_conditions("cpu"),
        "images": arguments.images,
        "cosine_head_before_and_after": {
            operator: compare(cosine[operator], base[operator]) for operator in OPERATORS
        },
        "beside_libra_removal": {
            operator: compare(gains, dict.fromkeys(gains, gains["libra-removal"]))
            for operator, gains in plain.items()
        },
    }
    print(json.dumps(result, indent=1))
    if arguments.output:
        print(write_result(arguments.output, "libra-rules", result))


if __name__ == "__main__":
    main()
