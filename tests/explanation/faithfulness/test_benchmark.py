"""The benchmark tells a good map from a random one, and its numbers are what they are said to be."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vit.bundle import Bundle
from vit.data.images import Preprocess
from vit.explanation.faithfulness.baselines import centre_maps, edge_maps, random_maps
from vit.explanation.faithfulness.benchmark import Benchmark, Measurement
from vit.explanation.faithfulness.faithfulness_result import FaithfulnessResult, summarise
from vit.explanation.faithfulness.grid_pointing import build_mosaics
from vit.explanation.faithfulness.map_metrics import (
    REMOVED,
    compute_pointing,
    compute_saco,
    estimate,
    find_order,
    win_rate,
)
from vit.explanation.methods.table import METHODS


@pytest.fixture(scope="module")
def measurement(trained) -> Measurement:
    preprocess = Preprocess(image_size=(24, 24), std=(1.0, 1.0, 1.0))
    bundle = Bundle(trained.model, preprocess, tuple("0123456789g"), name="digits", sha256="0" * 64)
    images, classes = trained.images[:128], trained.classes[:128]
    return Benchmark(bundle, images, classes, ("rollout", "gae"), few_images=8, mosaics=24).measure()


def test_the_metrics_tell_a_good_map_from_a_random_one(measurement: Measurement) -> None:
    """Leave-one-out beats random on each metric with disjoint intervals; a random map's SaCo interval contains
    0."""
    assert summarise(measurement)["checks"] == {
        "leave-one-out beats random: deletion": True,
        "leave-one-out beats random: insertion": True,
        "leave-one-out beats random: saco": True,
        "leave-one-out beats random: grid_pointing": True,
        "random SaCo is about 0": True,
    }


def test_areas_are_trapezoids_of_the_stored_curves(measurement: Measurement) -> None:
    for name, curves in measurement.curves.items():
        expected = np.trapezoid(curves["deletion"], REMOVED, axis=1) / 0.9
        assert np.abs(measurement.values["deletion"][name] - expected).max() < 1e-5


def test_every_metric_holds_every_map_it_can(measurement: Measurement) -> None:
    for metric in ("deletion", "insertion", "saco", "leave_one_out_correlation", "deletion_mean", "insertion_blur"):
        assert set(measurement.values[metric]) == {
            "rollout", "gae", "leave-one-out", "centre", "edges", "random",
        }  # fmt: skip
    assert all(np.isfinite(v).all() for values in measurement.values.values() for v in values.values())


def test_a_map_that_does_not_depend_on_the_class_points_by_chance(measurement: Measurement) -> None:
    assert np.abs(measurement.values["grid_pointing"]["rollout"] - 0.25).max() < 1e-6


def test_the_report_is_files_that_agree(measurement: Measurement, tmp_path: Path) -> None:
    result = FaithfulnessResult(measurement, {"model": "digits"}, ids=["a"])
    result.save(tmp_path)
    table = result.table
    figures = json.loads((tmp_path / "faithfulness.json").read_text())
    assert (tmp_path / "faithfulness.md").read_text() == table + "\n"
    assert (tmp_path / "faithfulness.png").stat().st_size > 10_000
    with np.load(tmp_path / "faithfulness.npz") as arrays:
        mean = float(arrays["saco.gae"].mean())
    assert abs(figures["metrics"]["saco"]["methods"]["gae"]["mean"] - mean) < 1e-6
    assert f"{mean:.3f}" in next(line for line in table.splitlines() if line.startswith("| gae"))
    assert figures["metrics"]["deletion"]["methods"]["gae"]["wins"]["random"] > 0.7


def test_planted_evidence_is_found(trained, planted) -> None:
    """Where the glyph decides the class the truth is known. How the methods rank is reported, not
    demanded."""
    accuracy = planted.measure_pointing(trained.model, trained.images, trained.classes, trained.glyph)
    print(accuracy)
    assert accuracy["leave-one-out"] >= 0.9
    assert max(accuracy[method] for method in METHODS) >= 0.9
    assert min(accuracy.values()) < 0.5  # and some do point elsewhere: the test can tell


def test_saco_equals_the_published_pairs_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    maps, weight = torch.rand(3, 4, 5, generator=generator), torch.rand(3, 20, generator=generator)

    def predict(kept: torch.Tensor) -> torch.Tensor:
        return weight.gather(1, kept).sum(dim=1)

    found = compute_saco(predict, maps)
    for image in range(3):
        values = maps[image].flatten().double()
        groups = values.argsort(descending=True).reshape(10, 2)
        score = total = 0.0
        for i in range(10):
            for j in range(i + 1, 10):
                difference = float(values[groups[i]].sum() - values[groups[j]].sum())
                holds = weight[image][groups[i]].sum() >= weight[image][groups[j]].sum()
                score += difference if holds else -difference
                total += abs(difference)
        assert abs(float(found[image]) - score / total) < 1e-5


def test_saco_is_one_for_the_truth_and_minus_one_for_its_opposite() -> None:
    weight = torch.rand(2, 30)

    def predict(kept: torch.Tensor) -> torch.Tensor:
        return weight.gather(1, kept).sum(dim=1)

    truth = weight.reshape(2, 5, 6)
    assert torch.allclose(compute_saco(predict, truth), torch.ones(2))
    assert torch.allclose(compute_saco(predict, -truth), -torch.ones(2))
    assert torch.equal(compute_saco(predict, torch.ones(2, 5, 6)), torch.zeros(2))


def test_pointing_is_the_positive_share_inside() -> None:
    maps = torch.tensor([[[3.0, -5.0], [1.0, 0.0]], [[-1.0, -1.0], [-1.0, -1.0]]])
    inside = torch.tensor([[True, True], [False, False]]).expand(2, 2, 2)
    assert compute_pointing(maps, inside).tolist() == [0.75, 0.5]


def test_intervals_are_paired_and_cover_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=400)
    found = estimate({"a": values, "b": values + 1})
    assert abs(found["b"].low - found["a"].low - 1) < 1e-9  # the same images were drawn for both
    assert found["a"].low < values.mean() < found["a"].high
    assert 0.15 < found["a"].high - found["a"].low < 0.25  # 2 · 1.96 / √400


def test_win_rate_counts_ties_half_and_knows_the_direction() -> None:
    method, baseline = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 2.0, 4.0, 5.0])
    assert win_rate(method, baseline, higher_is_better=True) == 0.375
    assert win_rate(method, baseline, higher_is_better=False) == 0.625


def test_order_falls_and_ties_stay_in_reading_order() -> None:
    assert find_order(torch.tensor([[[1.0, 3.0], [3.0, 2.0]]])).tolist() == [[1, 2, 3, 0]]


def test_baselines_depend_only_on_what_they_should() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = random_maps(2, (4, 4), generator=generator)
    assert not torch.equal(noise, random_maps(2, (4, 4), generator=generator))
    centre = centre_maps(1, (5, 7))[0]
    assert centre.argmax() == 17
    assert torch.allclose(centre, centre.flip(0, 1))
    images = torch.zeros(1, 3, 16, 16)
    images[..., 9:] = 1.0  # one vertical edge, in the third column of patches
    assert edge_maps(images, (4, 4))[0].argmax(dim=1).tolist() == [2, 2, 2, 2]


def test_mosaics_show_four_different_classes_in_reading_order() -> None:
    images = torch.arange(6.0).reshape(6, 1, 1, 1).expand(6, 3, 2, 2)
    mosaics, targets = build_mosaics(images, torch.tensor([0, 1, 2, 3, 4, 4]), count=5, seed=0)
    assert mosaics.shape == (5, 3, 4, 4)
    for mosaic, of_mosaic in zip(mosaics, targets, strict=True):
        assert len(set(of_mosaic.tolist())) == 4
        quarters = [mosaic[0, 0, 0], mosaic[0, 0, 2], mosaic[0, 2, 0], mosaic[0, 2, 2]]
        assert [min(int(value), 4) for value in quarters] == of_mosaic.tolist()


def test_too_few_classes_make_no_mosaic() -> None:
    mosaics, _ = build_mosaics(torch.zeros(4, 3, 2, 2), torch.tensor([0, 0, 1, 2]), count=3, seed=0)
    assert len(mosaics) == 0
