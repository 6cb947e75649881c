"""The table of records says what its rows say."""

from itertools import pairwise
from typing import Any

import pytest
from ladder import LEVERS, RECIPE, list_rungs
from records import ROOT, build_cost_table, build_ladder, format_share
from time_to_accuracy import compare

from vit.config import flatten_config, load_config


def make_run(*points: tuple[float, float]) -> dict[str, Any]:
    return {"curve": [{"seconds": seconds, "epoch": 1, "top1": top1} for seconds, top1 in points]}


def test_a_target_nobody_reached_gives_a_bound() -> None:
    ours = [make_run((50, 0.6), (100, 0.8)), make_run((60, 0.76)), make_run((90, 0.75))]
    reached = compare(ours, [make_run((400, 0.5), (900, 0.75))], 0.75)
    assert reached == {
        "top1": 0.75, "ours_seconds": 90, "rival_seconds": 900, "rival_reached_it": True, "ratio": 10.0,
    }  # fmt: skip
    bound = compare(ours, [make_run((400, 0.5), (900, 0.7))], 0.75)
    assert (bound["rival_reached_it"], bound["ratio"]) == (False, 10.0)
    assert compare([*ours, make_run((50, 0.7))], [make_run((400, 0.8))], 0.75)["ratio"] is None


def test_accuracy_at_minutes_is_the_mean_of_the_last_figures_so_far() -> None:
    row = {
        "recipe": "configs/cifar10/cpu.yaml",
        "overrides": ["data.name=folder", "train.epochs=2"],
        "runs": [make_run((59, 0.5), (170, 0.7)), make_run((60, 0.6), (181, 0.9))],
        "rival_runs": [make_run((200, 0.4), (700, 0.5))],
    }
    lines = build_cost_table({"record-cifar10-cpu-machine": row})
    assert lines[2] == (
        "| `cifar10/cpu.yaml` `train.epochs=2` | 55.0 | 65.0 | 80.0 (ended) | 80.0 (ended) | 80.0 (ended) |"
    )
    assert lines[3] == "| timm's model, plain loop | – | – | 40.0 | 40.0 | 50.0 (ended) |"


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (None, "–"),
        ({"mean": 0.815, "standard_deviation": None}, "81.5 %"),
        ({"mean": 0.815, "standard_deviation": 0.0031}, "81.5 ± 0.3 %"),
    ],
)
def test_a_share_comes_with_its_spread(figure: dict[str, Any] | None, text: str) -> None:
    assert format_share(figure) == text


def test_a_rung_of_the_ladder_has_one_lever_more_than_the_one_before() -> None:
    rungs = list(list_rungs().values())
    climbed = [flatten_config(load_config(ROOT / RECIPE, changes)) for changes in rungs[: len(LEVERS) + 1]]
    assert climbed[-1] == flatten_config(load_config(ROOT / RECIPE))
    for number, (before, after) in enumerate(pairwise(climbed)):
        pulled = {key for key in after if before[key] != after[key]}
        assert pulled == {item.split("=")[0] for item in list(LEVERS.values())[number]}


def test_the_ladder_tells_its_rungs_from_what_was_left_out() -> None:
    def make_rung(top1: float, *seconds: float) -> dict[str, Any]:
        runs = [{"seconds": of, "cold": number == 0} for number, of in enumerate(seconds)]
        figure = {"mean": top1, "standard_deviation": None}
        return {"runs": runs, "ours": {"seeds": len(runs), "test_top1": figure}}

    rungs = {"first": make_rung(0.5, 100), "+ y": make_rung(0.6, 200, 110), "x": make_rung(0.4, 90)}
    assert build_ladder({"ladder-a": {"recipe": "configs/a.yaml", "rungs": rungs}})[2:] == [
        "| first | 50.0 % | 100 | 1 |",
        "| + y | 60.0 % | 110 | 2 |",
        "| instead: x | 40.0 % | 90 | 1 |",
    ]
