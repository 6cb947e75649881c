"""Damage depends on the image alone and grows with its strength."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Launcher
from vit.analysis.robustness.measure import build_transforms, damage


@pytest.mark.parametrize("side", [32, 96])
def test_damage_grows_repeats_and_is_the_images_own(side: int) -> None:
    coarse = np.random.default_rng(0).integers(30, 226, (11, 11, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR))
    batch = np.stack([picture, 255 - picture])
    transforms = build_transforms(side)
    assert len(transforms) == 8
    for name, strengths in transforms.items():
        sizes = []
        for transform in strengths:
            damaged = damage(batch, transform, [7, 2**63 + 1])
            alone = damage(batch[1:], transform, [2**63 + 1])
            assert np.array_equal(damaged[1:], alone), name
            sizes.append(np.abs(damaged.astype(float) - batch).mean())
        assert 0.3 < sizes[0] < sizes[-1], name


@pytest.mark.extended
def test_the_command_prints_what_is_measured(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    outcome = cli.succeed("robustness", tiny_run, "--output", tmp_path / "out")
    content = json.loads((tmp_path / "out" / "robustness.json").read_text())
    assert len(content["accuracies"]) == 8
    assert all(len(values) == 3 for values in content["accuracies"].values())
    assert "pixelate" in outcome.text
    assert content["num_images"] > 100
