"""The benchmark tells a good map from a random one, and its numbers are what they are said to
be."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.pretend_device import pretend_device
from vit.analysis.faithfulness import benchmark as benchmark_module
from vit.analysis.faithfulness.baselines import baseline_maps, centre_maps, edge_maps
from vit.analysis.faithfulness.benchmark import MIN_IMAGES, Benchmark, Measurement
from vit.analysis.faithfulness.map_metrics import estimate, find_best, find_order
from vit.analysis.faithfulness.result import COLUMNS, FaithfulnessResult
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.checks.token_ablation import (
    build_probability,
    build_removal,
    leave_one_out,
    tile_patches,
)
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import list_methods

METHODS_ON_DEVICE = ("rollout", "raw", "gae", "legrad", "input-x-gradient")


def make_bundle(model: nn.Module) -> Bundle:
    preprocess = Preprocess(image_size=(24, 24), std=(1.0, 1.0, 1.0))
    return Bundle(model, preprocess, tuple("0123456789g"), name="digits", sha256="0" * 64)


@pytest.fixture(scope="module")
def measurement(trained) -> Measurement:
    images, classes = trained.images[:128], trained.classes[:128]
    methods = ("rollout", "gae")
    bundle = make_bundle(trained.model)
    return Benchmark(bundle, images, classes, methods, filled=16, few=8).measure()


def test_the_metrics_tell_a_good_map_from_a_random_one(measurement: Measurement) -> None:
    """Leave-one-out beats random on each metric with disjoint intervals."""
    for metric, higher_is_better in (("deletion", False), ("insertion", True), ("srg", True)):
        means = estimate(measurement.values[metric])
        better, worse = means["leave-one-out"], means["random"]
        if not higher_is_better:
            better, worse = worse, better
        assert better.low > worse.high, metric


def test_every_metric_holds_every_map_it_can(measurement: Measurement) -> None:
    for metric in (
        "srg",
        "srg_mean",
        "srg_blur",
        "deletion",
        "insertion",
        "leave_one_out_correlation",
    ):
        assert set(measurement.values[metric]) == {
            "rollout", "gae", "leave-one-out", "centre", "edges", "random",
        }  # fmt: skip
    assert all(
        np.isfinite(v).all() for values in measurement.values.values() for v in values.values()
    )


def test_the_gain_is_insertion_less_deletion(measurement: Measurement) -> None:
    values = measurement.values
    for name in ("rollout", "leave-one-out", "random"):
        gain = values["insertion"][name] - values["deletion"][name]
        assert np.abs(values["srg"][name] - gain).max() < 1e-6
    assert values["srg"]["leave-one-out"].mean() > 0.3
    assert values["srg_mean"]["leave-one-out"].mean() > 0.3
    assert values["srg_blur"]["leave-one-out"].mean() > 0.2
    assert np.abs(values["srg"]["random"].mean()) < 0.05


def test_a_maps_gain_is_minus_that_of_its_opposite(trained) -> None:
    """Removing the most relevant first is keeping the least relevant: both curves run over 10 % to
    100 % kept."""
    bundle = make_bundle(trained.model)
    benchmark = Benchmark(bundle, trained.images[:16], trained.classes[:16], ("rollout",))
    benchmark.grid, benchmark.precision = (4, 4), "float32"
    maps = torch.rand(1, 16, 4, 4)
    deletion, insertion = benchmark._compute_areas(maps, fill="auto")
    deletion_of_opposite, insertion_of_opposite = benchmark._compute_areas(-maps, fill="auto")
    gain = insertion - deletion
    assert gain.abs().max() > 0.01
    assert (gain + insertion_of_opposite - deletion_of_opposite).abs().max() < 1e-5


def test_the_plan_is_the_work_that_is_done(trained) -> None:
    benchmark = Benchmark(
        make_bundle(trained.model), trained.images[:24], trained.classes[:24], ("rollout", "gae")
    )
    done: list[float] = []
    benchmark.advance = lambda forwards, task: done.append(forwards)
    work, seconds = benchmark.plan
    assert seconds > 0
    benchmark.measure()
    assert 0.8 < sum(done) / work < 1.1


def test_a_limited_time_measures_fewer_images_and_says_so(trained) -> None:
    images, classes = trained.images[:64], trained.classes[:64]
    bundle = make_bundle(trained.model)
    whole = Benchmark(bundle, images, classes, ("rollout",))
    whole.fit(1e9)
    assert len(whole.images) == 64
    assert whole.result.notes == []

    _, seconds = whole.plan
    quarter = Benchmark(bundle, images, classes, ("rollout",))
    quarter.__dict__["_forward_seconds"] = whole._forward_seconds
    quarter.grid, quarter.group_side, quarter._cost = whole.grid, whole.group_side, whole._cost
    quarter.fit(seconds / 4)
    assert MIN_IMAGES < len(quarter.images) < 40
    assert len(quarter.classes) == len(quarter.images)
    assert quarter.plan[1] <= seconds / 4
    assert quarter.result.notes == [
        "deletion and insertion curves have half of their points",
        f"{len(quarter.images)} of 64 images fit into {seconds / 240:g} minutes",
    ]

    least = Benchmark(bundle, images, classes, ("rollout",))
    least.fit(1e-9)
    assert len(least.images) == MIN_IMAGES
    assert least.filled == least.few == MIN_IMAGES // 2
    measured = least.measure().values
    assert len(measured["srg"]["rollout"]) == MIN_IMAGES
    assert len(measured["srg_blur"]["rollout"]) == MIN_IMAGES // 2
    assert "name fewer methods" in least.result.notes[-1]


@pytest.mark.extended
def test_curves_of_half_the_points_have_nearly_the_same_areas(trained) -> None:
    images, classes = trained.images[:32], trained.classes[:32]
    areas = []
    for step in (1, 2):
        benchmark = Benchmark(make_bundle(trained.model), images, classes, ("rollout",))
        benchmark.curve_step = step
        values = benchmark.measure().values
        areas.append(values["srg"]["rollout"].mean())
    assert areas[1] == pytest.approx(areas[0], abs=0.05)


def test_of_large_grids_groups_are_left_out(trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_module, "LARGE_GRID", 4)
    images, classes = trained.images[:16], trained.classes[:16]
    benchmark = Benchmark(make_bundle(trained.model), images, classes, ("rollout",))
    measurement = benchmark.measure()

    maps = benchmark._leave_one_out(trained.model, images, classes)
    tiles = maps.unflatten(2, (2, 2)).unflatten(1, (2, 2))  # [n, 2, 2, 2, 2]
    assert (tiles == tiles[:, :, :1, :, :1]).all()
    expected = leave_one_out(
        build_probability(build_removal(trained.model, images, grid=(4, 4)), classes),
        batch=16,
        groups=tile_patches((4, 4), 2),
        device=images.device,
    )
    torch.testing.assert_close(tiles[:, :, 0, :, 0].flatten(1), expected)
    assert "groups of 2 × 2 patches: a single one of 4 × 4" in measurement.notes[0]
    itself = measurement.values["leave_one_out_correlation"]["leave-one-out"]
    assert np.abs(itself - 1).max() < 1e-6


def test_a_centre_that_beats_a_method_is_bold() -> None:
    """By paired differences: `lower` is below it on every image, `equal` isn't told apart."""
    noise = np.random.default_rng(0).normal(size=(2, 200)).astype(np.float32)
    names = ("rollout", "gae", "random", "edges", "leave-one-out")
    gains = dict.fromkeys(names, noise[0] + 1) | {"rollout": noise[0] - 0.1, "centre": noise[0]}
    measurement = Measurement(dict.fromkeys(COLUMNS, gains))

    result = FaithfulnessResult(measurement, {}, ids=["a"])
    assert result.summary["metrics"]["srg_blur"]["below_centre"] == ["rollout"]
    row = next(line for line in result.table.splitlines() if line.startswith("| centre"))
    assert row.count("**") == 6  # three gains

    gains["rollout"] = noise[1] + 0.1
    result = FaithfulnessResult(measurement, {}, ids=["a"])
    assert result.summary["metrics"]["srg"]["below_centre"] == []
    assert "| **" not in next(line for line in result.table.splitlines() if "| centre" in line)


@pytest.mark.extended
def test_bfloat16_agrees_where_it_is_used(trained) -> None:
    """For removals alone, and to the tolerance that `Benchmark.precision` states."""
    found = {}
    for precision in ("float32", "bfloat16"):
        benchmark = Benchmark(
            make_bundle(trained.model), trained.images, trained.classes, ("rollout", "gae"), few=8
        )
        benchmark.precision = precision
        found[precision] = benchmark.measure().values
    exact, close = found["float32"], found["bfloat16"]
    for metric in ("deletion", "insertion", "srg", "srg_mean"):
        for name, values in exact[metric].items():
            assert abs(values.mean() - close[metric][name].mean()) < 0.002, (metric, name)
    for metric in ("leave_one_out_correlation", "randomised_correlation"):
        assert all(
            np.array_equal(values, close[metric][name]) for name, values in exact[metric].items()
        ), metric


@pytest.mark.extended
def test_the_numbers_of_an_accelerator_are_those_of_the_host(trained) -> None:
    """Patch orders and random maps were on the host, tokens on the device."""

    def measure(model: nn.Module) -> Measurement:
        benchmark = Benchmark(
            make_bundle(model),
            trained.images[:12],
            trained.classes[:12],
            METHODS_ON_DEVICE,
            batch_size=8,
            filled=8,
            few=8,
        )
        benchmark.precision = "float32"
        return benchmark.measure()

    expected = measure(copy.deepcopy(trained.model))
    with pretend_device():
        found = measure(copy.deepcopy(trained.model).to("npu"))
    assert found.values.keys() == expected.values.keys()
    for metric, of_metric in expected.values.items():
        for name, values in of_metric.items():
            assert np.abs(found.values[metric][name] - values).max() < 1e-4, (metric, name)


def test_the_report_is_files_that_agree(measurement: Measurement, tmp_path: Path) -> None:
    result = FaithfulnessResult(measurement, {"model": "digits"}, ids=["a"])
    result.save(tmp_path)
    table = result.table
    figures = json.loads((tmp_path / "faithfulness.json").read_text())
    assert (tmp_path / "faithfulness.md").read_text() == table + "\n"
    assert (tmp_path / "faithfulness.png").stat().st_size > 10_000
    with np.load(tmp_path / "faithfulness.npz") as arrays:
        mean = float(arrays["srg.gae"].mean())
    assert abs(figures["metrics"]["srg"]["methods"]["gae"]["mean"] - mean) < 1e-6
    assert f"{mean:.3f}" in next(line for line in table.splitlines() if line.startswith("| gae"))


def test_planted_evidence_is_found(trained) -> None:
    """Where a glyph decides the class, the maximum of a map should lie on it. How the methods rank is
    not demanded."""
    has_glyph = trained.glyph >= 0
    images, classes, glyphs = (
        values[has_glyph] for values in (trained.images, trained.classes, trained.glyph)
    )
    accuracy = {}
    for method in list_methods():
        _, _, (maps,) = compute_maps(trained.model, images, methods=[method])
        accuracy[method] = float((maps.values.flatten(1).argmax(dim=1) == glyphs).float().mean())
    falls = leave_one_out(
        build_probability(build_removal(trained.model, images, grid=(4, 4)), classes),
        batch=len(images),
        groups=tile_patches((4, 4), 1),
        device=images.device,
    )
    assert (falls.argmax(dim=1) == glyphs).float().mean() >= 0.9
    assert max(accuracy.values()) >= 0.9
    # and some do point elsewhere: the test can tell
    assert min(accuracy.values()) < 0.5


def test_intervals_are_paired_and_cover_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=400)
    found = estimate({"a": values, "b": values + 1})
    assert abs(found["b"].low - found["a"].low - 1) < 1e-9  # the same images were drawn for both
    assert found["a"].low < values.mean() < found["a"].high
    assert 0.15 < found["a"].high - found["a"].low < 0.25  # 2 · 1.96 / √400


def test_the_best_are_those_not_told_apart_from_the_highest() -> None:
    noise = np.random.default_rng(0).normal(size=(3, 400))
    values = {
        "low": noise[0] - 0.5,
        "high": noise[0],
        "level": noise[0] - 0.05 + noise[1],
        "same": noise[0] - 0.01,
    }
    assert (
        find_best(values) == ["high", "level"]
        if values["high"].mean() > values["level"].mean()
        else ["level", "high"]
    )
    assert "low" not in find_best(values)  # by 0.5 on every image, though its interval overlaps
    assert "same" not in find_best(
        {"high": values["high"], "same": values["same"]}
    )  # paired: lower on every image
    assert find_best({"a": noise[2], "b": noise[2]}) == ["a", "b"]


def test_intervals_are_those_of_resampled_means() -> None:
    values = np.random.default_rng(0).random(50)
    resamples = np.random.default_rng(0).integers(0, 50, (2000, 50))
    low, high = np.quantile(values[resamples].mean(axis=1), [0.025, 0.975])
    found = estimate({"a": values})["a"]
    assert (found.mean, found.low, found.high) == pytest.approx(
        (values.mean(), low, high), abs=1e-12
    )


def test_order_falls_and_ties_stay_in_reading_order() -> None:
    assert find_order(torch.tensor([[[1.0, 3.0], [3.0, 2.0]]])).tolist() == [[1, 2, 3, 0]]


def test_baselines_depend_only_on_what_they_should() -> None:
    first, second, _ = baseline_maps(torch.zeros(2, 3, 16, 16), (4, 4), seed=0)["random"]
    assert not torch.equal(first, second)
    centre = centre_maps(1, (5, 7))[0]
    assert centre.argmax() == 17
    assert torch.allclose(centre, centre.flip(0, 1))
    images = torch.zeros(1, 3, 16, 16)
    images[..., 9:] = 1.0  # one vertical edge, in the third column of patches
    assert edge_maps(images, (4, 4))[0].argmax(dim=1).tolist() == [2, 2, 2, 2]
