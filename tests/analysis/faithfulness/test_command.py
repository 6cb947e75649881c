"""`vit faithfulness`."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Launcher
from vit.analysis.faithfulness.command import COMMAND
from vit.analysis.faithfulness.result import FaithfulnessResult
from vit.explanation.methods.registry import list_methods


def test_it_measures_the_methods_asked_for_on_the_models_own_data(
    cli: Launcher, tiny_run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    cli.succeed(
        "faithfulness", tiny_run, "--method", "rollout,gae", "--num-images", 8, "--output", output
    )
    metrics = json.loads((output / "faithfulness.json").read_text())
    assert metrics["num_images"] == 8
    assert metrics["split"] == "test"
    assert len(set(metrics["image_ids"])) == 8
    assert metrics["metrics"].keys() == {"srg", "srg_mean"}
    assert metrics["metrics"]["srg"]["methods"].keys() == {"rollout", "gae", "random", "centre"}
    assert all(len(values) == 8 for values in metrics["values"]["srg_mean"].values())
    assert metrics["milliseconds"].keys() == {"rollout", "gae"}


def test_mistakes_get_a_sentence(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    assert "unknown method 'lrp'" in cli.fail(
        "faithfulness", tiny_run, "--method", "lrp", "--output", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_what_is_printed_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = (*list_methods(), "random", "centre")
    gains = {name: np.linspace(-0.5, 0.999, 12, dtype=np.float32) for name in names}
    result = FaithfulnessResult(
        values={"srg": gains, "srg_mean": gains},
        milliseconds=dict.fromkeys(list_methods(), 1234.5),
        conditions={},
        notes=[],
        ids=[f"{place}.png" for place in range(12)],
    )
    COMMAND.run(result, Path("out"))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "…" in line or (len(line) > 80 and "/" not in line)] == []
    for name in (*list_methods(), "random"):
        of_map = [line for line in lines if line.startswith(f"{name} ")]
        assert sum(line.count("(") == 2 for line in of_map) == 1  # both intervals
