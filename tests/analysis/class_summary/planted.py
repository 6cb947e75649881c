"""Scanned digits about the middle of noisy images, some of one class with a mark in the corner, and a
small model that is trained on them in seconds."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

from vit.analysis.class_summary.images import SummaryImages
from vit.analysis.class_summary.records import Summary
from vit.analysis.class_summary.summarize import summarize_images
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.vision_transformer import VisionTransformer

SIDE = 32
PATCH = 4
NUM_CLASSES = 3
MARKED_CLASS = 0
MARKED_SHARE = 0.3
EPOCHS = 8
BATCH = 32


@dataclass(frozen=True)
class Planted:
    """Images, uint8 [n, H, W, 3], their labels, and which of them have the mark."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    is_marked: NDArray[np.bool_]


def plant(*, size: int, seed: int, test: bool) -> Planted:
    """Digits of twice their size, up to 4 pixels from the middle of noise.

    Args:
        size: Side of the mark in the lower left corner, in pixels; 0 for none.
        seed: Draws the noise, the places and the images with a mark.
        test: Whether these are test images.
    """
    random = np.random.default_rng(seed)
    digits = load_digits()
    is_used = (digits.target < NUM_CLASSES) & ((np.arange(len(digits.target)) % 3 == 0) == test)
    scans = digits.images[is_used].repeat(2, axis=1).repeat(2, axis=2) * 12
    labels = digits.target[is_used].astype(np.int64)
    # the test images are few: each is placed three times
    times = 3 if test else 2
    scans = np.tile(scans, (times, 1, 1))
    labels = np.tile(labels, times)

    pixels = random.integers(0, 64, (len(labels), SIDE, SIDE, 3))
    height = scans.shape[1]
    corners = (SIDE - height) // 2 + random.integers(-4, 5, (len(labels), 2))
    for image, scan, (top, left) in zip(pixels, scans, corners.tolist(), strict=True):
        image[top : top + height, left : left + height] += scan[..., None].astype(int)
    is_marked = (labels == MARKED_CLASS) & (random.random(len(labels)) < MARKED_SHARE)
    if size:
        # the same colours in every image, as a logo has
        mark = np.random.default_rng(1).integers(0, 256, (size, size, 3))
        pixels[is_marked, SIDE - size :, :size] = mark
    return Planted(pixels.clip(0, 255).astype(np.uint8), labels, is_marked)


def train(images: Planted, *, seed: int) -> Bundle:
    """A small model, trained for seconds."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=SIDE,
        patch_size=PATCH,
        num_classes=NUM_CLASSES,
        embed_dim=32,
        depth=2,
        num_heads=2,
        global_pool="avg",
    )
    names = tuple(f"digit {label}" for label in range(NUM_CLASSES))
    bundle = Bundle.from_model(
        model, class_names=names, preprocess=Preprocess(image_size=(SIDE, SIDE))
    )
    model.train()
    inputs = bundle.preprocess.normalize(torch.from_numpy(images.pixels))
    labels = torch.from_numpy(images.labels)
    num_steps = EPOCHS * -(-len(labels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH):
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    return bundle


def summarize(bundle: Bundle, images: Planted, *, seed: int) -> Summary:
    """Summarise a model on images that it has not seen."""
    summary_images = SummaryImages(
        pixels=images.pixels,
        classes=images.labels,
        paths=[f"{number:04d}" for number in range(len(images.labels))],
    )
    return summarize_images(
        bundle, summary_images, method="libra-removal", batch_size=64, seed=seed
    )


def is_mark(strip: list[tuple[str, int]], *, size: int) -> bool:
    """Return True where most patches of a strip lie on the mark."""
    columns = SIDE // PATCH
    length = size // PATCH
    on_mark = [
        patch // columns >= columns - length and patch % columns < length for _, patch in strip
    ]
    return sum(on_mark) > len(on_mark) / 2
