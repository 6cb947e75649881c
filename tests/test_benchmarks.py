"""The tables of results say what the result files say."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import faithfulness
import pytest
from ablation import CHANGES, RECIPE, list_steps
from tables import PAGES, ROOT, build_ablation, build_minutes, build_tables, fill_page, format_accuracy
from time_to_accuracy import compare

from vit.config import flatten_config, load_config


def make_run(*points: tuple[float, float]) -> dict[str, Any]:
    return {"curve": [{"seconds": seconds, "epoch": 1, "top1": top1} for seconds, top1 in points]}


def test_a_target_nobody_reached_gives_a_bound() -> None:
    ours = [make_run((50, 0.6), (100, 0.8)), make_run((60, 0.76)), make_run((90, 0.75))]
    reached = compare(ours, [make_run((400, 0.5), (900, 0.75))], 0.75)
    assert reached == {
        "top1": 0.75, "ours_seconds": 90, "baseline_seconds": 900, "baseline_reached_it": True, "ratio": 10.0,
    }  # fmt: skip
    bound = compare(ours, [make_run((400, 0.5), (900, 0.7))], 0.75)
    assert (bound["baseline_reached_it"], bound["ratio"]) == (False, 10.0)
    assert compare([*ours, make_run((50, 0.7))], [make_run((400, 0.8))], 0.75)["ratio"] is None


def test_accuracy_at_minutes_is_the_mean_of_the_last_ones_so_far() -> None:
    result = {
        "recipe": "configs/cifar10/cpu.yaml",
        "overrides": ["data.name=folder", "train.epochs=2"],
        "runs": [make_run((59, 0.5), (170, 0.7)), make_run((60, 0.6), (181, 0.9))],
        "baseline_runs": [make_run((200, 0.4), (700, 0.5))],
    }
    lines = build_minutes({"recipe-cifar10-cpu-machine": result}).splitlines()
    assert lines[2] == (
        "| `cifar10/cpu.yaml` `train.epochs=2` | 55.0 | 65.0 | 80.0 (ended) | 80.0 (ended) | 80.0 (ended) |"
    )
    assert lines[3] == "| timm's model, plain loop | – | – | 40.0 | 40.0 | 50.0 (ended) |"


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (None, "–"),
        ({"mean": 0.815, "standard_deviation": None}, "81.5 %"),
        ({"mean": 0.815, "standard_deviation": 0.0031}, "81.5 ± 0.3 %"),
    ],
)
def test_an_accuracy_comes_with_its_spread(metric: dict[str, Any] | None, text: str) -> None:
    assert format_accuracy(metric) == text


def test_an_ablation_step_has_one_change_more_than_the_one_before() -> None:
    steps = list(list_steps().values())
    configs = [flatten_config(load_config(ROOT / RECIPE, changes)) for changes in steps[: len(CHANGES) + 1]]
    assert configs[-1] == flatten_config(load_config(ROOT / RECIPE))
    for number, (before, after) in enumerate(pairwise(configs)):
        changed = {key for key in after if before[key] != after[key]}
        assert changed == {item.split("=")[0] for item in list(CHANGES.values())[number]}


def test_the_ablation_tells_its_steps_from_the_alternatives() -> None:
    def make_step(top1: float, *seconds: float) -> dict[str, Any]:
        runs = [{"seconds": of, "cold": number == 0} for number, of in enumerate(seconds)]
        metric = {"mean": top1, "standard_deviation": None}
        return {"runs": runs, "ours": {"seeds": len(runs), "test_top1": metric}}

    steps = {"first": make_step(0.5, 100), "+ y": make_step(0.6, 200, 110), "x": make_step(0.4, 90)}
    assert build_ablation({"ablation-a": {"recipe": "configs/a.yaml", "steps": steps}}).splitlines()[2:] == [
        "| first | 50.0 % | 100 | 1 |",
        "| + y | 60.0 % | 110 | 2 |",
        "| instead: x | 40.0 % | 90 | 1 |",
    ]


def test_the_table_of_gains_has_every_model_and_marks_the_best() -> None:
    def make_model(*names: str, best: str) -> dict[str, Any]:
        gain = {"mean": 0.5, "low": 0.25, "high": 0.75, "of_leave_one_out": {"mean": 0.8, "low": 0.5, "high": 1.0}}
        methods = dict.fromkeys(names, gain) | {"random": {**gain, "of_leave_one_out": None}}
        return {"metrics": {metric: {"methods": methods, "best": [best]} for metric in faithfulness.GAINS}}

    models = {"digits": make_model("gae", "cdam", best="gae"), "cifar10": make_model("gae", best="gae")}
    tables = faithfulness.build_tables(models).split("\n\n")
    assert len(tables) == 4
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables[1].splitlines()]
    assert rows[0] == ["probability, patches filled with the mean", "digits", "cifar10"]
    assert rows[2] == ["gae", *["**0.500 (0.250–0.750), 80 %**"] * 2]
    assert rows[3] == ["cdam", "0.500 (0.250–0.750), 80 %", "–"]
    assert rows[4] == ["random", *["0.500 (0.250–0.750)"] * 2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_the_result_files_say(page: Path) -> None:
    assert fill_page(page.read_text(), build_tables()) == page.read_text(), "run make results"
