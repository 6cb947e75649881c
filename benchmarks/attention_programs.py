"""Measure `vit explain` beside other programs, from image files to pictures.

    OMP_NUM_THREADS=2 python benchmarks/attention_programs.py FOLDER --vit-explain CHECKOUT --output benchmarks/results

All have the same random weights of a ViT-Ti/16 at 224 px, built beforehand. The other programs take one image at a
time, as their scripts do:

- vit-explain (https://github.com/jacobgil/vit-explain), the checkout that --vit-explain names: rollout with its own
  defaults, on timm's model without fused attention, which its hooks need.
- pytorch-grad-cam (package grad-cam, if it is installed): Grad-CAM on timm's model, as in its usage_examples.

The programs take turns round by round in one process; a result is the median over the rounds.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timm.models
import torch
from conditions import describe_conditions, write_result
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

import vit
from vit.data.images import list_images

NAME = "attention-programs"
TITLE = "ViT-Ti/16 at 224 px"
ARCHITECTURE = {"embed_dim": 192, "depth": 12, "num_heads": 3, "num_classes": 1000}
SIZE = 224
MEAN = STD = (0.5, 0.5, 0.5)
OURS = {
    "vit explain, rollout, without checks": {"methods": "rollout", "checks": False},
    "vit explain, rollout, with checks": {"methods": "rollout", "checks": True},
    "vit explain, libra-removal, with checks": {"methods": "libra-removal", "checks": True},
}

Program = Callable[[str, Path], None]  # reads an image, and writes a picture into the folder


def build_timm(device: str) -> Any:
    """Return timm's model with the same random weights at each call."""
    torch.manual_seed(0)
    return timm.models.VisionTransformer(**ARCHITECTURE).eval().to(device)


def build_vit_explain(checkout: Path, device: str) -> Program:
    """Return what its vit_explain.py does with an image, without the windows that it opens."""
    sys.path.insert(0, str(checkout))
    cv2, program = importlib.import_module("cv2"), importlib.import_module("vit_explain")
    model = build_timm(device)
    for block in model.blocks:
        block.attn.fused_attn = False
    rollout = program.VITAttentionRollout(model, head_fusion="max", discard_ratio=0.9)

    def explain(path: str, folder: Path) -> None:
        image = Image.open(path).convert("RGB").resize((SIZE, SIZE))
        pixels = np.array(image)[:, :, ::-1]
        values = normalize(pil_to_tensor(image)[None].float() / 255, MEAN, STD)
        mask = cv2.resize(rollout(values.to(device)), (SIZE, SIZE))
        cv2.imwrite(str(folder / f"{Path(path).stem}.png"), pixels)
        drawn = program.show_mask_on_image(pixels, mask)
        cv2.imwrite(str(folder / f"{Path(path).stem}.rollout.png"), drawn)

    return explain


def build_grad_cam(device: str) -> Program:
    """Return what pytorch-grad-cam's usage_examples/vit_example.py does with an image."""
    library = importlib.import_module("pytorch_grad_cam")
    images, cv2 = (
        importlib.import_module("pytorch_grad_cam.utils.image"),
        importlib.import_module("cv2"),
    )
    model: nn.Module = build_timm(device)

    def to_grid(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].unflatten(1, (14, 14)).movedim(-1, 1)  # [B, D, rows, columns]

    layers = [model.blocks[-1].norm1]  # type: ignore[index, union-attr]
    cam = library.GradCAM(model=model, target_layers=layers, reshape_transform=to_grid)

    def explain(path: str, folder: Path) -> None:
        pixels = np.float32(cv2.resize(cv2.imread(path, 1)[:, :, ::-1], (SIZE, SIZE))) / 255
        values = images.preprocess_image(pixels, mean=MEAN, std=STD).to(device)
        drawn = images.show_cam_on_image(pixels, cam(input_tensor=values, targets=None)[0])
        cv2.imwrite(str(folder / f"{Path(path).stem}.jpg"), drawn)

    return explain


def build_programs(
    images: list[str], *, vit_explain: Path | None, device: str
) -> dict[str, Callable[[Path], object]]:
    """Return the programs that are there, as functions of a folder; say which are not."""
    programs: dict[str, Callable[[Path], object]] = {}
    others: dict[str, Callable[[], Program]] = {
        "pytorch-grad-cam, Grad-CAM": lambda: build_grad_cam(device)
    }
    if vit_explain:
        others["vit-explain, rollout"] = lambda: build_vit_explain(vit_explain, device)
    for name, build in others.items():
        try:
            program = build()
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        programs[name] = lambda folder, program=program: [program(path, folder) for path in images]
    bundle = vit.Bundle.from_model(build_timm(device))
    for name, settings in OURS.items():
        programs[name] = lambda folder, settings=settings: vit.explain(
            bundle, images, output=folder / "maps", device=device, **settings
        )
    return programs


def measure(
    programs: dict[str, Callable[[Path], object]], *, count: int, rounds: int
) -> dict[str, float]:
    """Return the median images a second of each program; the first round warms up."""
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, run in programs.items():
            with TemporaryDirectory() as folder:
                start = time.perf_counter()
                run(Path(folder))
                if number:
                    rates[name].append(count / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of image files")
    parser.add_argument("--vit-explain", type=Path, help="a checkout of it")
    parser.add_argument("--count", type=int, default=64, help="images a round, evenly spaced")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help=f"folder of {NAME}-<machine>.json")
    options = parser.parse_args()
    paths = [str(path) for path in list_images(options.folder)]
    images = paths[:: max(1, len(paths) // options.count)][: options.count]
    programs = build_programs(images, vit_explain=options.vit_explain, device=options.device)
    rates = measure(programs, count=len(images), rounds=options.rounds)
    found = {"images": len(images), "images_per_second": rates}
    machine = describe_conditions(options.device)
    for name, rate in rates.items():
        print(f"{rate:8.1f} images/s  {name}")
    if options.output:
        write_result(options.output, NAME, {"machine": machine, "programs": {TITLE: found}})


if __name__ == "__main__":
    main()
