"""The one case where the correct explanation is known: a glyph that alone decides a class.

Scanned digits, a sixth of them with a glyph on a patch drawn at random; those belong to an eleventh
class. Where a model gives that class, the evidence is the glyph's patch, and a map is correct when
its maximum is there.

    python benchmarks/planted_evidence.py --seeds 3 --output benchmarks/results

prints each method's fraction of correct maps (chance: 1 in 16). `train` also makes larger grids,
whose glyph covers several patches.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from conditions import describe_conditions, write_result
from sklearn.datasets import load_digits
from torch import Tensor, nn

from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.explanation.checks.token_ablation import build_predictor, leave_one_out, tile_patches
from vit.explanation.methods.registry import METHODS, compute_maps
from vit.model.vision_transformer import VisionTransformer

GLYPH_CLASS, GRID, PATCH = 10, 4, 6
# pixels a side: of the pattern that a glyph is made of, and of a scanned digit
PATTERN, DIGIT = 3, 8
# of grids with patches of 4 pixels: patches a side of a glyph
LARGE_PATCH, LARGE_GLYPH = 4, 3
HELD_OUT = 397
EPOCHS, BATCH = 20, 50


def plant_glyphs(
    pixels: Tensor,
    labels: Tensor,
    *,
    seed: int,
    grid: int = GRID,
    patch: int = PATCH,
    size: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Images [n, 3, side, side] of digits [n, 8, 8], their classes, and the first patch, row by
    row, of the glyph of size × size patches (-1 without one)."""
    generator = torch.Generator().manual_seed(seed)
    scale = grid * patch // DIGIT
    enlarged = pixels.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    images = (enlarged[:, None].expand(-1, 3, -1, -1) - 0.3).clone()
    classes = labels.clone()

    num_places = grid - size + 1  # a side
    places = torch.randint(num_places**2, (len(images),), generator=generator)
    without = torch.rand(len(images), generator=generator) > 1 / 6
    glyphs = (places // num_places * grid + places % num_places).masked_fill(without, -1)

    side = size * patch
    pattern = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    glyph = pattern.repeat(side // PATTERN, side // PATTERN) - 0.3
    for index in torch.where(glyphs >= 0)[0]:
        top, left = (patch * place for place in divmod(int(glyphs[index]), grid))
        images[index, :, top : top + side, left : left + side] = glyph
        classes[index] = GLYPH_CLASS
    return images, classes, glyphs


def train(
    *, seed: int = 0, grid: int = GRID, epochs: int = EPOCHS
) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A small model, and the held-out images that it gets right with their classes and glyphs. Ten
    seconds; of larger grids, of patches of 4 pixels and glyphs of 3 × 3 patches, minutes."""
    shape = {"grid": grid, "patch": PATCH, "size": 1}
    if grid != GRID:
        shape = {"grid": grid, "patch": LARGE_PATCH, "size": LARGE_GLYPH}
    digits = load_digits()
    pixels, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=grid * shape["patch"],
        patch_size=shape["patch"],
        num_classes=11,
        embed_dim=48,
        depth=3,
        num_heads=3,
    )
    last = len(pixels) - HELD_OUT
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=epochs * (last // BATCH)
    )
    for epoch in range(epochs):
        images, classes, _ = plant_glyphs(
            pixels[:last], labels[:last], seed=1000 * seed + epoch, **shape
        )
        for chosen in torch.randperm(last).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[chosen]), classes[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    images, classes, glyphs = plant_glyphs(
        pixels[last:], labels[last:], seed=1000 * seed + epochs, **shape
    )
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in images.split(BATCH)])
    right = logits.argmax(dim=1) == classes
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
