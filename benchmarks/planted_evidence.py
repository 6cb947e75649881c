"""The one case where the correct explanation is known: a glyph that alone decides a class.

Scanned digits, a sixth of them with a glyph on a patch drawn at random; those belong to an eleventh
class. Where a model gives that class, the evidence is the glyph's patch, and a map is correct when
its maximum is there.

    python benchmarks/planted_evidence.py --seeds 3 --output benchmarks/results

prints each method's fraction of correct maps (chance: 1 in 16).
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from conditions import describe_conditions, write_result
from sklearn.datasets import load_digits
from torch import Tensor, nn

from vit.explanation.faithfulness.map_metrics import to_markdown
from vit.explanation.faithfulness.token_ablation import build_predictor, leave_one_out, tile_patches
from vit.explanation.methods.registry import METHODS, compute_maps
from vit.model.vision_transformer import VisionTransformer

GLYPH_CLASS, GRID, PATCH = 10, 4, 6
HELD_OUT = 397
EPOCHS, BATCH = 20, 50


def plant_glyphs(pixels: Tensor, labels: Tensor, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images [n, 3, 24, 24] of digits [n, 8, 8], their classes, and the glyph's patch of 4×4 (-1
    without one)."""
    generator = torch.Generator().manual_seed(seed)
    images = (
        pixels.repeat_interleave(3, 1).repeat_interleave(3, 2)[:, None].expand(-1, 3, -1, -1) - 0.3
    )
    images, classes = images.clone(), labels.clone()
    places = torch.randint(GRID**2, (len(images),), generator=generator)
    places[torch.rand(len(images), generator=generator) > 1 / 6] = -1
    glyph = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]).repeat(2, 2) - 0.3
    for index in torch.where(places >= 0)[0]:
        top, left = (PATCH * int(place) for place in divmod(int(places[index]), GRID))
        images[index, :, top : top + PATCH, left : left + PATCH] = glyph
        classes[index] = GLYPH_CLASS
    return images, classes, places


def train(*, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A small model, and the held-out images that it gets right with their classes and glyphs. Ten
    seconds."""
    digits = load_digits()
    pixels, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=GRID * PATCH, patch_size=PATCH, num_classes=11, embed_dim=48, depth=3, num_heads=3
    )
    last = len(pixels) - HELD_OUT
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=EPOCHS * (last // BATCH)
    )
    for epoch in range(EPOCHS):
        images, classes, _ = plant_glyphs(pixels[:last], labels[:last], seed=1000 * seed + epoch)
        for chosen in torch.randperm(last).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[chosen]), classes[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    images, classes, glyphs = plant_glyphs(pixels[last:], labels[last:], seed=1000 * seed + EPOCHS)
    model.eval()
    with torch.no_grad():
        right = model(images).argmax(dim=1) == classes
    return model, images[right], classes[right], glyphs[right]


def measure_pointing(
    model: nn.Module, images: Tensor, classes: Tensor, glyphs: Tensor
) -> dict[str, float]:
    """The fraction of glyphs on which the maximum of each method is, and of leave-one-out with
    either operator."""
    images, classes, glyphs = (values[glyphs >= 0] for values in (images, classes, glyphs))
    accuracy = {}
    for method in METHODS:
        _, _, (maps,) = compute_maps(model, images, methods=[method])
        accuracy[method] = float((maps.values.flatten(1).argmax(dim=1) == glyphs).float().mean())
    for fill, name in {"auto": "leave-one-out", "mean": "leave-one-out, mean fill"}.items():
        predict = build_predictor(model, images, classes, grid=(GRID, GRID), fill=fill)
        falls = leave_one_out(
            predict, batch=len(images), groups=tile_patches((GRID, GRID), 1), device=images.device
        )
        accuracy[name] = float((falls.argmax(dim=1) == glyphs).float().mean())
    return accuracy


def build_table(result: dict[str, Any]) -> str:
    """A row for each map, a column for each model."""
    runs = result["pointing"]
    names = sorted(runs[0], key=lambda name: -sum(run[name] for run in runs))
    rows = [[name, *(f"{100 * run[name]:.0f} %" for run in runs)] for name in names]
    return to_markdown(["map", *(f"seed {seed}" for seed in range(len(runs)))], rows)


def main() -> None:
    """Train, measure, print and write."""
    parser = argparse.ArgumentParser(description="Do the maps point at evidence that was planted?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for planted-evidence-<machine>.json")
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    result = {
        "machine": machine,
        "pointing": [measure_pointing(*train(seed=seed)) for seed in range(options.seeds)],
    }
    print(build_table(result))
    if options.output:
        write_result(options.output, "planted-evidence", result)


if __name__ == "__main__":
    main()
