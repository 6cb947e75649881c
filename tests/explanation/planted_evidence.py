"""A model for which the correct explanation is known: a glyph on one patch alone decides a class.

Scanned digits, a sixth of them with a glyph on a patch that is drawn at random. Those belong to an
eleventh class. Where the model predicts that class, the evidence is the glyph's patch, and a map is
correct when its maximum is there.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from vit.model.vision_transformer import VisionTransformer

GLYPH_CLASS, GRID, PATCH = 10, 4, 6
# Side in pixels of the pattern that a glyph repeats, and of a scanned digit.
PATTERN, DIGIT = 3, 8
# Patch side in pixels and glyph side in patches, for grids larger than the default.
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
