"""The tables of results say what the result files say."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention_programs
import faithfulness
import low_rank
import numpy as np
import pretrained
import pytest
import study_tables
import time_to_accuracy
import torch
from ablation import CHANGES, RECIPE, SHORT, summarise
from PIL import Image
from tables import (
    PAGES,
    ROOT,
    build_ablation,
    build_minutes,
    build_tables,
    fill_page,
    format_accuracy,
)
from time_to_accuracy import compare
from torch import nn

import vit
from tests.conftest import SaveModel
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
        described = {"config": time_to_accuracy.describe_config(load_config(ROOT / RECIPE))}
        monkeypatch.setattr(time_to_accuracy, "describe_recipe", lambda *_: described)
        command = [
            "time_to_accuracy.py",
            str(ROOT / RECIPE),
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


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_the_ablation_changes_the_recipe(name: str) -> None:
    recipe, changed = (
        flatten_config(load_config(ROOT / RECIPE, [*SHORT, *more])) for more in ([], CHANGES[name])
    )
    found = {key for key in changed if recipe[key] != changed[key]}
    assert found == {item.split("=")[0] for item in CHANGES[name]}


def test_the_ablation_compares_runs_of_the_same_seed() -> None:
    def make_runs(*top1: float) -> list[dict[str, Any]]:
        return [
            {"seed": seed, "validation_top1": of, "processor_seconds": 60.0}
            for seed, of in enumerate(top1)
        ]

    recipe = make_runs(0.80, 0.81, 0.82)
    summary = summarise(make_runs(0.79, 0.81, 0.80), recipe)
    # differences of −1, 0 and −2 points: a standard error of 1/√3, and Student's factor of 4.303
    # for two degrees
    assert summary["difference"] == pytest.approx(-0.01)
    assert summary["half_interval"] == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    steps = {
        "the recipe": {"overrides": [], "runs": recipe, "summary": summarise(recipe, recipe)},
        "x": {"overrides": ["a.b=1"], "runs": make_runs(0.79, 0.81, 0.80), "summary": summary},
        "y": {"overrides": ["a.b=2"], "runs": []},
    }
    ablation = {
        "recipe": "configs/a.yaml",
        "settings": [],
        "machine": {"device": "cpu"},
        "steps": steps,
    }
    table = build_ablation({"ablation-a": ablation})
    assert table.splitlines()[2:] == [
        "| the recipe | 81.0 ± 1.0 % |  | 60 | 3 |",
        "| x | 80.0 ± 1.0 % | −1.0 ± 2.5 | 60 | 3 |",
        "",
        "cpu: `ablation-a.json`.",
    ]


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


def test_sets_of_photos_are_drawn_by_seed_and_leave_the_unseen_ones_alone(tmp_path: Path) -> None:
    for split, count in (("train", 9), ("val", 3)):
        for name in ("a", "b"):
            folder = tmp_path / "source" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{split}-{name}-{number}.jpg").write_bytes(b"")
    image_set = pretrained.ImageSet((6, 2))

    def draw(folder: str, seed: int) -> list[str]:
        pretrained.draw_images(image_set, tmp_path / "source", tmp_path / folder, seed=seed)
        return sorted(path.name for path in (tmp_path / folder).rglob("*.jpg"))

    first = draw("first", 0)
    assert draw("again", 0) == first != draw("other", 1)
    counts = [sum(name.startswith(start) for name in first) for start in ("train-a", "train-b")]
    assert counts == [6, 2]
    assert sum(name.startswith("val") for name in first) == 6


def test_pretrained_weights_are_summarised_by_set_and_way() -> None:
    log = """data         photos: 720 training
length       epochs=3 (4 minutes (--minutes) on this CPU)
probe        block 10 of 12, the class token, C=0.01; top-1 in cross-validation 91.2% (720 training \
images; features 12 s, regressions 3 s)
more photos  from 720 to 1,440 photos: 93 %
the probe's top-1 on the validation images is 90.00%
"""
    plan = pretrained.read_plan(log)
    assert plan.keys() == {"length", "probe", "more photos", "validation of the probe"}
    assert plan["length"] == "epochs=3 (4 minutes (--minutes) on this CPU)"
    probe = pretrained.read_probe(plan)
    assert probe == {
        "cross_validated_top1": 0.912,
        "feature_seconds": 12.0,
        "fit_seconds": 3.0,
        "validation_top1": 0.9,
    }
    # of so few images that there are no folds
    few = {"probe": "block 12 of 12 (4 of 9 training images; features 2 s, regressions 0 s)"}
    assert pretrained.read_probe(few) == {"feature_seconds": 2.0, "fit_seconds": 0.0}

    cells = {
        f"10 x 5 | {way} | {seed}": {
            "top1": top1,
            "macro_f1": top1,
            "seconds": 60.0,
            "minutes": 2.0,
            "unseen_images": 240,
            "probe": probe,
        }
        for way, values in {
            "probe alone": (0.6, 0.7),
            "probe, then fine-tuning": (0.65, 0.7),
        }.items()
        for seed, top1 in enumerate(values)
    }
    summary = pretrained.summarise(cells)["10 x 5"]
    assert summary["probe alone"]["top1"]["mean"] == pytest.approx(0.65)
    assert summary["probe, then fine-tuning"]["over_probe"] == pytest.approx([0.05, 0.0])
    result = {
        "summary": {"10 x 5": summary},
        "cells": cells,
        "weights": "ViT",
        "minutes": None,
        "machine": {"device": "cpu", "commit": "a"},
    }
    lines = pretrained.build_table(result).splitlines()
    ways = "65.0 ± 7.1 % (60 s, n=2) | 67.5 ± 3.5 % (60 s, n=2) | – | – | –"
    assert lines[2] == f"| 10 x 5 | 2 | {ways} |"
    assert lines[-2:] == [
        "| 10 x 5, 0 | 60.0 % | 91.2 % | 90.0 % | 12 | 3 | 60 |",
        "| 10 x 5, 1 | 70.0 % | 91.2 % | 90.0 % | 12 | 3 | 60 |",
    ]


def test_the_most_telling_cells_of_pretrained_weights_are_first() -> None:
    options = SimpleNamespace(seeds=2, sets=["10 x 30", "10 x 5"], ways=pretrained.WAYS)
    cells = pretrained.order_cells(options)
    assert len(set(cells)) == len(cells) == 20
    assert [seed for *_, seed in cells] == 10 * [0] + 10 * [1]
    assert {way for _, way, _ in cells[10:14]} == set(pretrained.TELLING_WAYS)


def test_merged_adapters_compute_what_they_did_beside_the_weights() -> None:
    torch.manual_seed(0)
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = vit.VisionTransformer(**shape, num_classes=3).eval()
    images = torch.randn(2, 3, 8, 8)
    before = model(images).detach()
    low_rank.add_adapters(model, rank=4)
    # they begin at zero
    torch.testing.assert_close(model(images), before)
    trained = {name for name, values in model.named_parameters() if values.requires_grad}
    adapters = {name for name in trained if name.endswith((".down", ".up"))}
    assert len(adapters) == 2 * 4 * 2
    assert trained - adapters == {"head.weight", "head.bias", "norm.weight", "norm.bias"}

    for name, values in model.named_parameters():
        if name.endswith(".up"):
            nn.init.normal_(values, std=0.1)
    adapted = model(images)
    merged = low_rank.merge_adapters(model)
    assert (adapted - before).abs().max() > 0.01
    torch.testing.assert_close(merged(images), adapted)
    plain = vit.VisionTransformer(**shape, num_classes=3)
    assert merged.state_dict().keys() == plain.state_dict().keys()


def test_adapters_are_trained_and_merged_into_a_model_file(
    tmp_path: Path, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "TRAINING_FRACTION", 0.02)
    rng = np.random.default_rng(0)
    for label, name in enumerate(("dark", "bright")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(60 * label, 200 + 50 * label, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    weights = save_model(tmp_path / "weights.safetensors", num_heads=2)
    low_rank.train(tmp_path / "photos", weights, tmp_path / "run", minutes=1.0, seed=0)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    # the probe's and others
    assert len(lines) > 1
    bundle = vit.load_bundle(tmp_path / "run")
    assert bundle.class_names == ("bright", "dark")
    assert not any(name.endswith((".down", ".up")) for name in bundle.model.state_dict())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_the_result_files_say(page: Path) -> None:
    tables = build_tables() | study_tables.build_tables()
    assert fill_page(page.read_text(), tables) == page.read_text(), (
        "run python benchmarks/tables.py --write; python research/study_tables.py --write"
    )
