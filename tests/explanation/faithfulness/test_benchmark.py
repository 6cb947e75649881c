"""The benchmark tells a good map from a random one, and its numbers are what they are said to be."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.pretend_device import pretend_device
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
    estimate_ratio,
    find_best,
    find_order,
    win_rate,
)
from vit.explanation.methods.table import METHODS

METHODS_ON_DEVICE = ("rollout", "raw", "gae", "legrad", "input-x-gradient")


def make_bundle(model: nn.Module) -> Bundle:
    preprocess = Preprocess(image_size=(24, 24), std=(1.0, 1.0, 1.0))
    return Bundle(model, preprocess, tuple("0123456789g"), name="digits", sha256="0" * 64)


@pytest.fixture(scope="module")
def measurement(trained) -> Measurement:
    images, classes = trained.images[:128], trained.classes[:128]
    sizes = {"grouped": 128, "filled": 16, "blurred": 8, "few": 8, "mosaics": 24}
    return Benchmark(make_bundle(trained.model), images, classes, ("rollout", "gae"), **sizes).measure()


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


def test_the_gain_is_insertion_less_deletion_with_either_operator(measurement: Measurement) -> None:
    values = measurement.values
    for suffix in ("", "_mean", "_blur"):
        for name in ("rollout", "leave-one-out", "random"):
            gain = values[f"insertion{suffix}"][name] - values[f"deletion{suffix}"][name]
            assert np.abs(values[f"srg{suffix}"][name] - gain).max() < 1e-6
    assert values["srg"]["leave-one-out"].mean() > 0.3
    assert (
        values["srg_logit"]["leave-one-out"].mean() > 3 * values["srg"]["leave-one-out"].mean()
    )  # of logits, not of 0 to 1
    assert np.abs(values["srg"]["random"].mean()) < 0.05


def test_a_maps_gain_is_minus_that_of_its_opposite(trained) -> None:
    """Removing the most relevant first is keeping the least relevant: both curves run over 10 % to 100 % kept."""
    bundle = make_bundle(trained.model)
    benchmark = Benchmark(bundle, trained.images[:16], trained.classes[:16], ("rollout",))
    benchmark.grid, benchmark.precision = (4, 4), "float32"
    maps = torch.rand(1, 16, 4, 4)
    benchmark._measure_curves(["map"], maps, fill="auto")
    gain = benchmark.result.values["srg"]["map"].copy()
    benchmark._measure_curves(["map"], -maps, fill="auto")
    assert np.abs(gain + benchmark.result.values["srg"]["map"]).max() < 1e-5


def test_the_plan_is_the_work_that_is_done(trained) -> None:
    benchmark = Benchmark(make_bundle(trained.model), trained.images[:24], trained.classes[:24], ("rollout", "gae"))
    done: list[float] = []
    benchmark.advance = lambda forwards, task: done.append(forwards)
    work, seconds = benchmark.plan
    assert seconds > 0
    benchmark.measure()
    assert 0.8 < sum(done) / work < 1.1


def test_bfloat16_agrees_where_it_is_used(trained) -> None:
    """For removals alone, and to the tolerance that `Benchmark.precision` states."""
    found = {}
    for precision in ("float32", "bfloat16"):
        sizes = {"filled": 64, "few": 8, "mosaics": 4}
        benchmark = Benchmark(make_bundle(trained.model), trained.images, trained.classes, ("rollout", "gae"), **sizes)
        benchmark.precision = precision
        found[precision] = benchmark.measure().values
    exact, close = found["float32"], found["bfloat16"]
    for metric in ("deletion", "insertion", "srg", "deletion_mean", "insertion_mean", "srg_mean"):
        for name, values in exact[metric].items():
            assert abs(values.mean() - close[metric][name].mean()) < 0.002, (metric, name)
    for name, values in exact["saco"].items():
        assert abs(values.mean() - close["saco"][name].mean()) < 0.01, name
    for metric in ("leave_one_out_correlation", "randomised_correlation", "sensitivity", "grid_pointing"):
        assert all(np.array_equal(values, close[metric][name]) for name, values in exact[metric].items()), metric


def test_the_numbers_of_an_accelerator_are_those_of_the_host(trained) -> None:
    """Patch orders, random maps and blocks left out were on the host, tokens on the device."""

    def measure(model: nn.Module) -> Measurement:
        sizes = {"filled": 8, "blurred": 8, "few": 8, "mosaics": 3, "batch_size": 8}
        benchmark = Benchmark(make_bundle(model), trained.images[:12], trained.classes[:12], METHODS_ON_DEVICE, **sizes)
        benchmark.precision = "float32"
        return benchmark.measure()

    expected = measure(copy.deepcopy(trained.model))
    with pretend_device():
        found = measure(copy.deepcopy(trained.model).to("npu"))
    assert found.values.keys() == expected.values.keys()
    for metric, of_metric in expected.values.items():
        for name, values in of_metric.items():
            assert np.abs(found.values[metric][name] - values).max() < 1e-4, (metric, name)


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


def test_the_best_are_those_not_told_apart_from_the_highest() -> None:
    noise = np.random.default_rng(0).normal(size=(3, 400))
    values = {"low": noise[0] - 0.5, "high": noise[0], "level": noise[0] - 0.05 + noise[1], "same": noise[0] - 0.01}
    assert (
        find_best(values) == ["high", "level"] if values["high"].mean() > values["level"].mean() else ["level", "high"]
    )
    assert "low" not in find_best(values)  # by 0.5 on every image, though its interval overlaps
    assert "same" not in find_best({"high": values["high"], "same": values["same"]})  # paired: lower on every image
    assert find_best({"a": noise[2], "b": noise[2]}) == ["a", "b"]


def test_a_ratio_has_a_paired_interval_and_none_where_the_reference_may_be_zero() -> None:
    reference = np.random.default_rng(0).normal(1, 0.5, size=400)
    ratio = estimate_ratio(0.8 * reference, reference)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((0.8, 0.8, 0.8))
    wider = estimate_ratio(np.random.default_rng(1).normal(1, 0.5, size=400), reference)
    assert wider.low < 1 < wider.high
    assert estimate_ratio(reference, reference - 1) is None


def test_intervals_are_those_of_resampled_means() -> None:
    values = np.random.default_rng(0).random(50)
    resamples = np.random.default_rng(0).integers(0, 50, (2000, 50))
    low, high = np.quantile(values[resamples].mean(axis=1), [0.025, 0.975])
    found = estimate({"a": values})["a"]
    assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high), abs=1e-12)


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
