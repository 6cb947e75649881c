"""`vit faithfulness`."""

import json
from pathlib import Path

import numpy as np

from tests.conftest import Launcher


def test_it_measures_the_methods_asked_for_on_the_models_own_data(
    cli: Launcher, tiny_run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    cli.succeed("faithfulness", tiny_run, "--methods", "rollout,gae", "--images", 16, "--output", output)
    metrics = json.loads((output / "faithfulness.json").read_text())
    assert metrics["num_images"] == 16
    assert metrics["split"] == "test"
    assert len(set(metrics["image_ids"])) == 16
    assert set(metrics["metrics"]["deletion"]["methods"]) == {
        "rollout", "gae", "leave-one-out", "random", "centre", "edges",
    }  # fmt: skip
    assert {"faithfulness.md", "faithfulness.png", "faithfulness.npz"} <= {p.name for p in output.iterdir()}


def test_the_same_seed_measures_the_same(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    arrays = []
    for name in ("first", "second"):
        cli.succeed("faithfulness", tiny_run, "--methods", "rollout", "--images", 8, "--output", tmp_path / name)
        with np.load(tmp_path / name / "faithfulness.npz") as stored:
            arrays.append({key: stored[key] for key in stored.files})
    assert all(np.array_equal(values, arrays[1][key]) for key, values in arrays[0].items())


def test_mistakes_get_a_sentence(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    assert "unknown method 'lrp'" in cli.fail(
        "faithfulness", tiny_run, "--methods", "lrp", "--output", tmp_path / "out"
    )
    assert "nowhere is no data set" in cli.fail(
        "faithfulness", tiny_run, "--data", tmp_path / "nowhere", "--output", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()
