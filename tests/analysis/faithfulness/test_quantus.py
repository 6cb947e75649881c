"""Deletion and the correlation with leave-one-out equal Quantus's on the same model, images and
maps.

Quantus (Hedström et al. 2023) flips features of painted images, so leave-one-out is by painting
over here, not by leaving tokens out.
"""

from typing import Any

import numpy as np
import pytest
import quantus
import torch
from quantus.functions.similarity_func import correlation_spearman

from vit.analysis.faithfulness.map_metrics import find_order
from vit.explanation.checks.sanity_checks import rank_correlation
from vit.explanation.checks.token_ablation import (
    build_probability,
    build_removal,
    deletion_curve,
    leave_one_out,
    tile_patches,
)

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


def test_correlation_with_leave_one_out_is_the_faithfulness_estimate(
    painted: dict[str, Any],
) -> None:
    estimate = quantus.FaithfulnessEstimate(
        features_in_step=painted["features_in_step"],
        perturb_baseline=0.0,
        similarity_func=correlation_spearman,
        **AS_IT_IS,
    )
    maps = painted["maps"]
    drops = leave_one_out(
        painted["predict"], batch=len(maps), groups=tile_patches(GRID, 1), device=maps.device
    )
    found = rank_correlation(maps, drops.unflatten(1, GRID))
    expected = np.array(estimate(**painted["arguments"]))
    assert np.ptp(expected) > 0.2
    assert np.abs(found.numpy() - expected).max() < 1e-5
