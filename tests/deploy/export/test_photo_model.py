"""The preprocessing inside an exported model is the one that the model was evaluated with."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vit.data.preprocess import Interpolation, Preprocess, ResizeMode
from vit.deploy.export.photo_model import Classifier, PhotoModel

SIZES = [
    (1, 1),
    (1, 40),
    (40, 1),
    (3, 200),
    (200, 3),
    (17, 23),
    (64, 48),
    (90, 301),
    (301, 90),
    (333, 250),
    (36, 27),
]


class Pixels(nn.Module):
    """Stands for a classifier: logits, probabilities and features."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return images.flatten(1), images.flatten(1), images.flatten(1)


@pytest.mark.parametrize(
    ("interpolation", "image_size", "crop_pct", "mode"),
    [
        ("bicubic", (24, 40), 0.875, "crop"),
        ("bilinear", (32, 32), 1.0, "crop"),
        ("bicubic", (16, 8), 0.4, "crop"),
        ("bicubic", (24, 40), 0.875, "pad"),
        ("bilinear", (32, 32), 1.0, "stretch"),
    ],
)
def test_every_pixel_is_that_of_preprocess(
    interpolation: Interpolation,
    image_size: tuple[int, int],
    crop_pct: float,
    mode: ResizeMode,
) -> None:
    """Noise, in which a filter overshoots 0 and 255 and every wrong rounding shows."""
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    preprocess = Preprocess(
        image_size,
        crop_pct=crop_pct,
        mean=mean,
        std=std,
        interpolation=interpolation,
        resize_mode=mode,
    )
    model = PhotoModel(Pixels(), preprocess)
    random = np.random.default_rng(0)
    for height, width in [*SIZES, preprocess.resize_size, preprocess.image_size]:
        pixels = random.choice(np.array([0, 60, 200, 255], dtype=np.uint8), (height, width, 3))
        expected = preprocess([Image.fromarray(pixels)])
        *_, normalised = model(torch.from_numpy(pixels)[None])
        torch.testing.assert_close(
            normalised, expected, atol=1e-6, rtol=0, msg=f"{height}×{width} {interpolation}"
        )


def test_pad_is_traced() -> None:
    """Also by the oldest torch, which can't compare all sizes that are free."""
    model = PhotoModel(Pixels(), Preprocess((24, 40), resize_mode="pad"))
    names = {0: "batch", 1: "height", 2: "width"}
    sizes = {place: torch.export.Dim(name, max=2**16) for place, name in names.items()}
    images = torch.randint(0, 256, (2, 27, 48, 3), dtype=torch.uint8)
    program = torch.export.export(model, (images,), dynamic_shapes=(sizes,), strict=False)
    wide = torch.randint(0, 256, (3, 50, 400, 3), dtype=torch.uint8)
    torch.testing.assert_close(program.module()(wide)[-1], model(wide)[-1])


def test_probabilities_are_at_the_temperature() -> None:
    class Constant(nn.Module):
        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2)

    logits, probabilities, _ = Classifier(Constant(), temperature=4.0)(torch.zeros(1, 3, 2, 2))
    torch.testing.assert_close(logits, torch.tensor([[0.25, 0.75]]), atol=1e-7, rtol=0)
    torch.testing.assert_close(probabilities, logits.softmax(1), atol=1e-7, rtol=0)
