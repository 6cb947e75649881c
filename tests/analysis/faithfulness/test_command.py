"""`vit faithfulness`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import vit
from tests.conftest import Launcher, Outcome
from vit.analysis.faithfulness import result as result_module
from vit.explanation.methods.registry import list_methods


@pytest.fixture(scope="module")
def measured(
    tiny_run: Path, tmp_path_factory: pytest.TempPathFactory, cli: Launcher
) -> tuple[Path, Outcome]:
    """A run directory of which all methods were measured, and what the command said in 80
    columns."""
    folder = tmp_path_factory.mktemp("measured")
    shutil.copytree(tiny_run, folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return folder / "run", cli.succeed(
            "faithfulness", folder / "run", "--num-images", 12, "--output", folder / "out"
        )


def test_it_measures_the_methods_asked_for_on_the_models_own_data(
    cli: Launcher, tiny_run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    cli.succeed(
        "faithfulness", tiny_run, "--method", "rollout,gae", "--num-images", 16, "--output", output
    )
    metrics = json.loads((output / "faithfulness.json").read_text())
    assert metrics["num_images"] == 16
    assert metrics["split"] == "test"
    assert len(set(metrics["image_ids"])) == 16
    assert set(metrics["metrics"]["deletion"]["methods"]) == {
        "rollout", "gae", "leave-one-out", "random", "centre", "edges",
    }  # fmt: skip
    assert {"faithfulness.md", "faithfulness.png", "faithfulness.npz"} <= {
        p.name for p in output.iterdir()
    }


def test_the_same_seed_measures_the_same(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    arrays = []
    for name in ("first", "second"):
        cli.succeed(
            "faithfulness",
            tiny_run,
            "--method",
            "rollout",
            "--num-images",
            8,
            "--output",
            tmp_path / name,
        )
        with np.load(tmp_path / name / "faithfulness.npz") as stored:
            arrays.append({key: stored[key] for key in stored.files})
    assert all(np.array_equal(values, arrays[1][key]) for key, values in arrays[0].items())


def test_mistakes_get_a_sentence(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    assert "unknown method 'lrp'" in cli.fail(
        "faithfulness", tiny_run, "--method", "lrp", "--output", tmp_path / "out"
    )
    assert "nowhere is not a data set" in cli.fail(
        "faithfulness", tiny_run, "--data", tmp_path / "nowhere", "--output", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_what_is_printed_fits_into_80_columns(measured: tuple[Path, Outcome]) -> None:
    _, outcome = measured
    lines = outcome.out.splitlines()
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []
    assert not [line for line in lines if "…" in line]
    for name in (*list_methods(), "leave-one-out", "random"):
        of_map = [line for line in lines if line.startswith(f"{name} ")]
        assert sum(line.count("(") == 2 for line in of_map) == 1  # both intervals
    assert sum("*" in line for line in lines if line.split(" ")[0] in list_methods()) >= 1


def test_the_best_method_is_kept_beside_the_model_and_taken(
    measured: tuple[Path, Outcome], cli: Launcher, tmp_path: Path
) -> None:
    run, _ = measured
    kept = json.loads((run / "model.faithfulness.json").read_text())
    best = kept["best_method"]
    gain = kept["gains"]["srg_both"][best]
    assert gain["low"] <= gain["mean"]
    # 12 images: both operators see all of them
    alone = [kept["gains"][metric][best]["mean"] for metric in ("srg", "srg_mean")]
    assert gain["mean"] == pytest.approx(np.mean(alone), abs=1e-6)
    assert kept["num_images"] == 12
    outcome = cli.succeed(
        "attention",
        run,
        "--num-images",
        2,
        "--method",
        "rollout,best",
        "--output",
        tmp_path / "maps",
    )
    assert f"on 12 images: {best} (gain" in outcome.text
    assert json.loads((tmp_path / "maps" / "manifest.json").read_text())["parameters"][
        "methods"
    ] == ["rollout", best]
    assert list(vit.explain(run, num_images=1, methods="best", checks=False).maps) == [best]


def test_a_best_method_of_other_weights_is_refused(
    measured: tuple[Path, Outcome], cli: Launcher, tmp_path: Path
) -> None:
    shutil.copytree(measured[0], run := tmp_path / "run")
    content = json.loads((run / "model.faithfulness.json").read_text())
    (run / "model.faithfulness.json").write_text(json.dumps(content | {"model_sha256": "0" * 64}))
    arguments = ("attention", run, "--num-images", 1, "--no-checks", "--output")
    assert "was measured with other weights; run vit faithfulness" in cli.fail(
        *arguments, tmp_path / "maps", "--method", "best"
    )
    assert not (tmp_path / "maps").exists()
    assert "was measured with other weights" in cli.succeed(*arguments, tmp_path / "maps").text
    best = content["best_method"]
    without_gain = content | {"gains": {"srg": {best: {"mean": 0.5}}}}
    for damaged in ("{", json.dumps(without_gain)):
        (run / "model.faithfulness.json").write_text(damaged)
        assert "is damaged; run vit faithfulness" in cli.fail(
            *arguments, tmp_path / "more", "--method", "best"
        )


def test_best_needs_a_measurement_of_a_model_file(
    cli: Launcher, tiny_run: Path, tmp_path: Path
) -> None:
    error = cli.fail("attention", tiny_run, "--method", "best", "--output", tmp_path / "out")
    assert f"no best method is known for {tiny_run}; run vit faithfulness {tiny_run} first" in error
    assert (
        "faithful"
        not in cli.succeed(
            "attention", tiny_run, "--num-images", 1, "--output", tmp_path / "out"
        ).text
    )
    with pytest.raises(ValueError, match="VisionTransformer is not a model file"):
        vit.explain(vit.load_bundle(tiny_run).model, methods="best")


@pytest.mark.extended
def test_a_folder_that_cannot_be_written_is_said_and_nothing_else(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(result_module, "write_text", refuse)
    result = vit.measure_faithfulness(tiny_run, num_images=8)
    assert "nothing is kept for --method best" in result.measurement.notes[-1]
    assert "Read-only file system" in result.measurement.notes[-1]
    assert not (tiny_run / "model.faithfulness.json").exists()


def test_a_choice_of_methods_says_nothing_about_the_best(
    cli: Launcher, tiny_run: Path, tmp_path: Path
) -> None:
    cli.succeed(
        "faithfulness",
        tiny_run,
        "--method",
        "rollout",
        "--num-images",
        8,
        "--output",
        tmp_path / "out",
    )
    assert not (tiny_run / "model.faithfulness.json").exists()
