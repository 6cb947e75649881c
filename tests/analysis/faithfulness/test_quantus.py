"""Deletion equals Quantus's pixel flipping (Hedström et al. 2023) on the same model, images and
maps."""

from typing import Any

import numpy as np
import pytest
import quantus
import torch

from vit.analysis.faithfulness.gains import build_probability, deletion_curve, find_order
from vit.explanation.patch_removal import build_removal

GRID = (6, 6)
PATCHES = GRID[0] * GRID[1]
AS_IT_IS = {"abs": False, "normalise": False, "disable_warnings": True}


@pytest.fixture(scope="module")
def painted(trained) -> dict[str, Any]:
    """Images whose every channel has the mean 0, which is what both then paint with, and arbitrary
    maps."""
    images, classes = trained.images[:16], trained.classes[:16]
    images = images - images.mean(dim=(-1, -2), keepdim=True)
    maps = torch.randn(16, *GRID, generator=torch.Generator().manual_seed(0))
    height, width = images.shape[-2] // GRID[0], images.shape[-1] // GRID[1]
    pixels = maps.repeat_interleave(height, dim=1).repeat_interleave(width, dim=2)
    return {
        "predict": build_probability(
            build_removal(trained.model, images, grid=GRID, fill="mean"), classes
        ),
        "maps": maps,
        "features_in_step": 3 * height * width,  # a patch
        "arguments": {
            "model": trained.model,
            "x_batch": images.numpy(),
            "y_batch": classes.numpy(),
            "a_batch": pixels[:, None].numpy(),
            "softmax": True,
            "device": "cpu",
        },
    }


def test_deletion_is_pixel_flipping(painted: dict[str, Any]) -> None:
    flip = quantus.PixelFlipping(
        features_in_step=painted["features_in_step"], perturb_baseline=0.0, **AS_IT_IS
    )
    curve = deletion_curve(
        painted["predict"],
        find_order(painted["maps"]),
        fractions=[(i + 1) / PATCHES for i in range(PATCHES)],
    )
    expected = np.array(flip(**painted["arguments"]))
    assert expected.std(axis=1).min() > 0.01  # the probability does move
    assert np.abs(curve.numpy() - expected).max() < 1e-5
