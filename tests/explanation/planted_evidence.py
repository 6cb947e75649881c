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
HELD_OUT = 397
EPOCHS, BATCH = 14, 50


def plant_glyphs(pixels: Tensor, labels: Tensor, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images [n, 3, 24, 24] of digits [n, 8, 8], their classes, and the patch, row by row, with the
    glyph (-1 without one)."""
    generator = torch.Generator().manual_seed(seed)
    enlarged = pixels.repeat_interleave(3, 1).repeat_interleave(3, 2)
    images = (enlarged[:, None].expand(-1, 3, -1, -1) - 0.3).clone()
    classes = labels.clone()
    places = torch.randint(GRID**2, (len(images),), generator=generator)
    without = torch.rand(len(images), generator=generator) > 1 / 6
    glyphs = places.masked_fill(without, -1)
    pattern = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    for index in torch.where(glyphs >= 0)[0]:
        top, left = (PATCH * place for place in divmod(int(glyphs[index]), GRID))
        images[index, :, top : top + PATCH, left : left + PATCH] = pattern.repeat(2, 2) - 0.3
        classes[index] = GLYPH_CLASS
    return images, classes, glyphs


def train() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A small model, and the held-out images that it gets right with their classes and glyphs. Ten
    seconds."""
    digits = load_digits()
    pixels, labels = torch.from_numpy(digits.images).float() / 16, torch.from_numpy(digits.target)
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=GRID * PATCH,
        patch_size=PATCH,
        num_classes=11,
        embed_dim=48,
        depth=3,
        num_heads=3,
    )
    last = len(pixels) - HELD_OUT
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=EPOCHS * (last // BATCH)
    )
    for epoch in range(EPOCHS):
        images, classes, _ = plant_glyphs(pixels[:last], labels[:last], seed=epoch)
        for chosen in torch.randperm(last).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[chosen]), classes[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    images, classes, glyphs = plant_glyphs(pixels[last:], labels[last:], seed=EPOCHS)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in images.split(BATCH)])
    right = logits.argmax(dim=1) == classes
    return model, images[right], classes[right], glyphs[right]
