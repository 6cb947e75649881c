"""The images that faithfulness is measured on: those that the model predicts correctly."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.bundle import Bundle
from vit.data.sets.source import ImageSource
from vit.model.logits import compute_logits

FEWEST_IMAGES = 8  # below which an interval says nothing


def select_correct_images(
    bundle: Bundle,
    source: ImageSource,
    labels: Int[np.ndarray, " N"],
    *,
    count: int,
    batch_size: int = 32,
    seed: int = 0,
) -> tuple[Float[Tensor, "n 3 H W"], Int[Tensor, " n"], list[str]]:
    """The first `count` images that the model predicts correctly, in an order shuffled with `seed`: model inputs,
    classes and ids. A wrong prediction has no evidence to point at. `labels` are those of `source` as indices of the
    model's classes. Unreadable images are passed over. Raises ValueError where fewer than `FEWEST_IMAGES` are left."""
    device = next(bundle.model.parameters()).device
    correct: list[tuple[Tensor, int, str]] = []
    order = np.random.default_rng(seed).permutation(len(source))
    for start in range(0, len(order), batch_size):
        pixels = {}
        for index in order[start : start + batch_size].tolist():
            try:
                with source.open(index) as image:
                    pixels[index] = bundle.preprocess.to_uint8(image)
            except (ValueError, OSError):
                continue
        if not pixels:
            continue
        images = bundle.preprocess.normalize(torch.from_numpy(np.stack(list(pixels.values()))))
        with torch.inference_mode():
            predicted = compute_logits(bundle.model, images.to(device)).argmax(dim=1).tolist()
        answers = zip(pixels, images, predicted, strict=True)
        correct += [(image, answer, source.ids[index]) for index, image, answer in answers if answer == labels[index]]
        if len(correct) >= count:
            break
    found = min(len(correct), count)
    if found < FEWEST_IMAGES:
        raise ValueError(f"the model predicts {found} of {len(source)} images correctly; {FEWEST_IMAGES} are needed")
    kept, classes, ids = zip(*correct[:count], strict=True)
    return torch.stack(kept), torch.tensor(classes), list(ids)
