"""`vit faithfulness`."""

import json
from pathlib import Path

import pytest

from tests.conftest import Launcher
from vit.explanation.methods.registry import list_methods


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
    assert metrics["metrics"].keys() == {"srg", "srg_mean"}
    assert metrics["metrics"]["srg"]["methods"].keys() == {"rollout", "gae", "random", "centre"}
    assert all(len(values) == 16 for values in metrics["values"]["srg_mean"].values())
    assert metrics["milliseconds"].keys() == {"rollout", "gae"}


def test_mistakes_get_a_sentence(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    assert "unknown method 'lrp'" in cli.fail(
        "faithfulness", tiny_run, "--method", "lrp", "--output", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_what_is_printed_fits_into_80_columns(
    cli: Launcher, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    options = ("--num-images", 12, "--output", tmp_path / "out")
    lines = cli.succeed("faithfulness", tiny_run, *options).out.splitlines()
    assert [line for line in lines if "…" in line or (len(line) > 80 and "/" not in line)] == []
    for name in (*list_methods(), "random"):
        of_map = [line for line in lines if line.startswith(f"{name} ")]
        assert sum(line.count("(") == 2 for line in of_map) == 1  # both intervals
