"""Measure images a second of `vit train` with this project's ViT-S/14 and with timm's module of the same shape, in turn.

python benchmarks/timm_module.py PHOTOS    # a folder of at least 384 photos in folders of classes
"""

import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import timm
from conditions import RESULTS, describe_conditions, write_result
from torch import nn

import vit
from vit.model.vision_transformer import VisionTransformer

NUM_TURNS = 3
CHANGES: dict[str, Any] = {
    "data.name": "folder", "data.image_size": 224, "data.validation_fraction": 0, "data.test_fraction": 0,
    "model.init": None, "model.probe": False, "schedule.warmup_epochs": 0,
    "train.batch_size": 32, "train.epochs": 2, "train.max_steps": 12, "train.device": "cpu",
}  # fmt: skip


def build(name: str, num_classes: int) -> nn.Module:
    if name == "timm":
        return timm.create_model("vit_small_patch14_dinov2", img_size=224, num_classes=num_classes)
    shape = {"patch_size": 14, "embed_dim": 384, "depth": 12, "num_heads": 6, "init_values": 1e-5}
    return VisionTransformer(224, num_classes=num_classes, **shape)


def main() -> None:
    photos = Path(sys.argv[1])
    num_classes = sum(folder.is_dir() for folder in photos.iterdir())
    speeds: dict[str, list[float]] = {"vit": [], "timm": []}
    for _ in range(NUM_TURNS):
        for name, found in speeds.items():
            with TemporaryDirectory() as folder:
                model = build(name, num_classes)
                vit.train(
                    "folder/finetune",
                    output=folder,
                    overrides=CHANGES | {"data.root": str(photos)},
                    model=model,
                )
                lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
            found.append(json.loads(lines[-1])["images_per_second"])
            print(name, found[-1], flush=True)
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    result = {
        "machine": describe_conditions("cpu"),
        "images_per_second": speeds,
        "median": medians,
        "vit_over_timm": medians["vit"] / medians["timm"],
    }
    print(write_result(RESULTS, "timm-module", result))


if __name__ == "__main__":
    main()
