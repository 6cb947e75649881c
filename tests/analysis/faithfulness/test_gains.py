"""The gain tells a good map from a random one, and its numbers are what they are said to be."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pretend_device import pretend_device
from vit.analysis.faithfulness.gains import (
    Predict,
    build_baselines,
    build_probability,
    compute_gain,
)
from vit.analysis.faithfulness.result import FaithfulnessResult, estimate, find_best
from vit.explanation.patch_removal import Fill, build_removal

GRID = (4, 4)


def build_predict(trained, count: int, fill: Fill = "auto") -> Predict:
    images, classes = trained.images[:count], trained.classes[:count]
    return build_probability(build_removal(trained.model, images, grid=GRID, fill=fill), classes)


def compute_drops(predict: Predict, count: int) -> Tensor:
    """What leaving out each patch takes away, as a map."""
    num_patches = GRID[0] * GRID[1]
    every_patch = torch.arange(num_patches)
    without = [
        predict(every_patch[every_patch != patch].expand(count, -1)) for patch in every_patch
    ]
    drops = predict(every_patch.expand(count, -1))[:, None] - torch.stack(without, dim=1)
    return drops.unflatten(1, GRID)


@pytest.mark.parametrize("fill", ["auto", "mean"])
def test_the_gain_tells_a_good_map_from_a_random_one(trained, fill: Fill) -> None:
    """By leave-one-out, with disjoint intervals."""
    predict = build_predict(trained, 128, fill)
    maps = {"good": compute_drops(predict, 128), **build_baselines(128, GRID)}
    gains = {name: compute_gain(predict, values).numpy() for name, values in maps.items()}
    means = estimate(gains)
    assert means["good"]["mean"] > 0.3
    assert means["good"]["low"] > means["random"]["high"]
    assert abs(means["random"]["mean"]) < 0.05


def test_a_maps_gain_is_minus_that_of_its_opposite(trained) -> None:
    """Removing the most relevant first is keeping the least relevant: both curves run over 10 % to
    100 % kept."""
    predict = build_predict(trained, 16)
    maps = torch.rand(16, *GRID, generator=torch.Generator().manual_seed(0))
    gain = compute_gain(predict, maps)
    assert gain.abs().max() > 0.01
    assert (gain + compute_gain(predict, -maps)).abs().max() < 1e-5


@pytest.mark.extended
def test_the_numbers_of_an_accelerator_are_those_of_the_host(trained) -> None:
    """Patch orders and random maps were on the host, tokens on the device."""
    images, classes = trained.images[:12], trained.classes[:12]
    maps = build_baselines(12, GRID)["random"]

    def measure(place: str) -> Tensor:
        model = copy.deepcopy(trained.model).to(place)
        compute_kept = build_removal(model, images.to(place), grid=GRID, batch_size=8)
        return compute_gain(build_probability(compute_kept, classes.to(place)), maps.to(place))

    expected = measure("cpu")
    with pretend_device():
        found = measure("npu").cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_the_report_is_files_that_agree(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(size=(2, 200)).astype(np.float32)
    gains = {"rollout": noise[0] - 0.1, "gae": noise[0], "random": noise[1]}
    result = FaithfulnessResult(
        values={"srg": gains, "srg_mean": gains},
        conditions={"model": "digits"},
        notes=[],
        ids=["a"],
    )
    result.save(tmp_path)
    figures = json.loads((tmp_path / "faithfulness.json").read_text())
    mean = figures["metrics"]["srg"]["methods"]["gae"]["mean"]
    assert mean == pytest.approx(np.mean(figures["values"]["srg"]["gae"]))
    assert figures["metrics"]["srg"]["best"] == ["gae"]
    row = next(row for row in result.rows if row[0] == "gae")
    assert f"{mean:.3f} (" in row[1]
    assert row[1].endswith("*")
    assert row[2].endswith("*")


def test_intervals_are_paired_and_those_of_resampled_means() -> None:
    values = np.random.default_rng(0).random(50)
    resamples = np.random.default_rng(0).integers(0, 50, (2000, 50))
    low, high = np.quantile(values[resamples].mean(axis=1), [0.025, 0.975])
    found = estimate({"a": values, "b": values + 1})
    assert (found["a"]["mean"], found["a"]["low"], found["a"]["high"]) == pytest.approx(
        (values.mean(), low, high), abs=1e-12
    )
    assert (
        abs(found["b"]["low"] - found["a"]["low"] - 1) < 1e-9
    )  # the same images were drawn for both


def test_the_best_are_those_not_told_apart_from_the_highest() -> None:
    noise = np.random.default_rng(0).normal(size=(3, 400))
    high = noise[0]
    # by 0.5 on every image, though its interval overlaps
    assert find_best({"high": high, "low": high - 0.5}) == ["high"]
    # paired: lower on every image
    assert find_best({"high": high, "same": high - 0.01}) == ["high"]
    level = {"high": high, "level": high - 0.05 + noise[1]}
    assert set(find_best(level)) == {"high", "level"}
    assert find_best({"a": noise[2], "b": noise[2]}) == ["a", "b"]
