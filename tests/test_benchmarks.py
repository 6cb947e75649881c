"""The tables of results say what the result files say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attention_programs
import faithfulness
import numpy as np
import pytest
import time_to_accuracy
from PIL import Image
from tables import (
    PAGES,
    ROOT,
    build_minutes,
    build_tables,
    fill_page,
    format_accuracy,
)
from time_to_accuracy import compare

from vit.config import load_config


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


def test_a_result_that_is_continued_names_the_commit_of_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(commit: str, *arguments: str) -> tuple[str, str | None]:
        machine = {"device": "cpu", "commit": commit}
        run = {"test_top1": 0.8, "seconds": 9.0, **make_run((5, 0.8))}
        monkeypatch.setattr(time_to_accuracy, "describe_conditions", lambda device: machine)
        monkeypatch.setattr(
            time_to_accuracy, "time_ours", lambda *_, seed, **__: {"seed": seed, **run}
        )
        monkeypatch.setattr(
            time_to_accuracy, "run_baseline", lambda *_, seed: {"seed": seed, **run}
        )
        described = {
            "config": time_to_accuracy.describe_config(
                load_config(ROOT / "configs/cifar10/cpu.yaml")
            )
        }
        monkeypatch.setattr(time_to_accuracy, "describe_recipe", lambda *_: described)
        command = [
            "time_to_accuracy.py",
            str(ROOT / "configs/cifar10/cpu.yaml"),
            "--name",
            "x",
            "--output",
            str(tmp_path),
            *arguments,
        ]
        monkeypatch.setattr(sys, "argv", command)
        time_to_accuracy.main()
        (path,) = tmp_path.iterdir()
        result = json.loads(path.read_text())
        assert len(result["runs"]) == int(arguments[arguments.index("--seeds") + 1])
        return result["machine"]["commit"], (result["baseline_machine"] or {}).get("commit")

    assert measure("first", "--seeds", "1") == ("first", None)
    assert measure("second", "--seeds", "1", "--continue", "--baseline", "timm") == (
        "first",
        "second",
    )
    assert measure("third", "--seeds", "2", "--continue") == ("third", "second")


def test_accuracy_at_minutes_is_the_mean_of_the_last_ones_so_far() -> None:
    result = {
        "recipe": "configs/cifar10/cpu.yaml",
        "overrides": ["data.name=folder", "train.epochs=2"],
        "machine": {"device": "cpu (AMD EPYC, Zen 4, 2 cores, avx512_bf16)"},
        "runs": [make_run((59, 0.5), (170, 0.7)), make_run((60, 0.6), (181, 0.9))],
        "baseline_runs": [make_run((200, 0.4), (700, 0.5))],
    }
    lines = build_minutes({"recipe-cifar10-cpu-machine": result}).splitlines()
    assert lines[2] == (
        "| `cifar10/cpu.yaml` `train.epochs=2` | AMD EPYC, Zen 4 | 55.0 | 65.0 | 80.0 (ended) | 80.0 (ended) "
        "| 80.0 (ended) |"
    )
    assert (
        lines[3]
        == "| timm's model, plain loop | AMD EPYC, Zen 4 | – | – | 40.0 | 40.0 | 50.0 (ended) |"
    )


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


def test_the_table_of_gains_has_every_model_and_marks_the_best() -> None:
    def make_model(*names: str, best: str) -> dict[str, Any]:
        gain = {
            "mean": 0.5,
            "low": 0.25,
            "high": 0.75,
            "of_leave_one_out": {"mean": 0.8, "low": 0.5, "high": 1.0},
        }
        methods = dict.fromkeys(names, gain) | {"random": {**gain, "of_leave_one_out": None}}
        return {
            "metrics": {
                metric: {"methods": methods, "best": [best]} for metric in faithfulness.GAINS
            }
        }

    models = {
        "digits": make_model("gae", "cdam", best="gae"),
        "cifar10": make_model("gae", best="gae"),
    }
    tables = faithfulness.build_tables(models).split("\n\n")
    # of the probability by three ways of removing patches, of the logit by two
    assert len(tables) == len(faithfulness.GAINS) == 5
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables[1].splitlines()]
    assert rows[0] == ["probability, patches filled with the mean", "digits", "cifar10"]
    assert rows[2] == ["gae", *["**0.500 (0.250–0.750), 80 %**"] * 2]
    assert rows[3] == ["cdam", "0.500 (0.250–0.750), 80 %", "–"]
    assert rows[4] == ["random", *["0.500 (0.250–0.750)"] * 2]
    for model in models.values():
        for metric in ("srg_logit", "srg_logit_mean"):  # in results of earlier versions
            del model["metrics"][metric]
    assert faithfulness.build_tables(models).split("\n\n") == tables[:3]


VIT_EXPLAIN = """
import numpy as np
class VITAttentionRollout:
    def __init__(self, model, head_fusion, discard_ratio):
        assert (head_fusion, discard_ratio) == ("max", 0.9) and not any(b.attn.fused_attn for b in model.blocks)
    def __call__(self, image):
        assert image.shape == (1, 3, 16, 16)
        return np.ones((2, 2), dtype=np.float32)
def show_mask_on_image(pixels, mask):
    return np.uint8(pixels * mask[..., None])
"""


@pytest.mark.extended
def test_programs_that_are_there_are_compared_and_the_others_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cv2")
    (tmp_path / "vit_explain.py").write_text(VIT_EXPLAIN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)  # as if it weren't installed
    for number in range(5):
        pixels = np.full((20, 30, 3), 50 * number, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    images = attention_programs.choose_images(tmp_path, 2)
    assert [Path(path).name for path in images] == ["0.png", "2.png"]
    tiny = {
        "img_size": 16,
        "patch_size": 8,
        "embed_dim": 16,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 3,
    }
    measured = attention_programs.measure_programs(tiny, images, vit_explain=tmp_path, rounds=1)
    sys.modules.pop("vit_explain")
    assert "pytorch-grad-cam, Grad-CAM is left out: " in capsys.readouterr().out
    rates, other = measured["images_per_second"], "vit-explain, rollout"
    ours = {name: rate for name, rate in rates.items() if name.startswith("vit attention, ")}
    assert (len(ours), set(rates) - set(ours)) == (6, {other})
    assert (
        0 < measured["largest_difference_of_bfloat16"] < 0.1
    )  # of four patches that hardly differ
    assert measured["ratios"] == {
        f"{name} / {other}": rate / rates[other] for name, rate in ours.items()
    }


def test_the_table_of_programs_has_every_ratio_and_what_checks_cost() -> None:
    programs = {
        "images_per_second": {"vit-explain, rollout": 4.0, "x": 10.0},
        "ratios": {"x / vit-explain, rollout": 2.5},
    }
    cost = {
        "methods": ["a", "b"],
        "formats": ["npz"],
        "without checks": 9.0,
        "with checks": 3.0,
        "times": 3.0,
    }
    tables = attention_programs.build_tables(
        {
            "machine": {"device": "cpu", "commit": "a"},
            "programs": {"ViT": programs},
            "checks": {"digits": [cost]},
        }
    )
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables.splitlines() if line
    ]
    assert rows[0] == ["ViT", "images/s", "/ vit-explain, rollout"]
    assert rows[2:4] == [["vit-explain, rollout", "4.0", ""], ["x", "10.0", "2.5 ×"]]
    assert rows[6] == ["digits", "a, b", "npz", "9.0", "3.0", "3.0"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_the_result_files_say(page: Path) -> None:
    text = page.read_text()
    assert fill_page(text, build_tables()) == text, "run python benchmarks/tables.py --write"


@pytest.mark.extended
def test_the_gpu_day_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 2)):
        for label in range(10):
            folder = tmp_path / "images" / split / f"class {label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    archive = shutil.make_archive(str(tmp_path / "images"), "tar", tmp_path / "images")

    def run(output: Path, **more: str) -> tuple[list[str], dict[str, Any]]:
        own = {"DEVICE": "cpu", "SMALL": "1", "OUT": str(output), **more}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(
            ["bash", str(ROOT / "benchmarks" / "gpu_day.sh"), archive],
            env=os.environ | own | {"PATH": path},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (result,) = output.glob("gpu-*.json")
        parts = json.loads(result.read_text())["parts"]
        return (output / "log.txt").read_text().splitlines(), parts

    log, parts = run(tmp_path / "whole")
    assert {name: part["ended"] for name, part in parts.items()} == dict.fromkeys(parts, "passed")
    assert len(parts) == 9
    assert [line for line in log if line.startswith("===== ")] == [
        f"===== {name}: passed, {part['seconds']} s" for name, part in parts.items()
    ]
    assert parts["attention_nan"]["result"]["failures"] == []
    assert set(parts["loop_24"]["result"]) == {"loop", "graph", "explicit"}
    assert parts["compiling"]["result"]["blocks, cold"]["graphs"] == 2
    (recipe,) = (tmp_path / "whole").glob("recipe-cifar10-speedrun-*.json")
    seeds = json.loads(recipe.read_text())["runs"]
    assert [(run["seed"], run["cold"], "test_top1" in run) for run in seeds] == [
        (0, True, True),
        (1, False, True),
    ]
    assert list((tmp_path / "whole").glob("train-throughput-*.json"))
    # what is late is cut, and said
    _, parts = run(tmp_path / "cut", ALL_SECONDS="2")
    order = ["passed", "out of time", "no time left"]
    ended = [order.index(part["ended"]) for part in parts.values()]
    assert ended == sorted(ended)
    assert ended.count(1) <= 1
    assert ended[-1] == 2
