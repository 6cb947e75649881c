"""`vit faithfulness`."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Launcher, Outcome
from vit.explanation.methods.registry import list_methods


@pytest.fixture(scope="module")
def measured(
    tiny_run: Path, tmp_path_factory: pytest.TempPathFactory, cli: Launcher
) -> tuple[Path, Outcome]:
    """A run directory of which all methods were measured, and what the command said in 80
    columns. Nothing is written beside the model."""
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
    assert metrics["metrics"].keys() == {"srg", "srg_mean"}
    assert metrics["metrics"]["srg"]["methods"].keys() == {"rollout", "gae", "random", "centre"}
    assert all(len(values) == 16 for values in metrics["values"]["srg_mean"].values())
    assert metrics["milliseconds"].keys() == {"rollout", "gae"}
    assert (output / "faithfulness.md").is_file()


def test_mistakes_get_a_sentence(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    assert "unknown method 'lrp'" in cli.fail(
        "faithfulness", tiny_run, "--method", "lrp", "--output", tmp_path / "out"
    )
    assert "nowhere is not a data set" in cli.fail(
        "faithfulness", tiny_run, "--data", tmp_path / "nowhere", "--output", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def test_what_is_printed_fits_into_80_columns(measured: tuple[Path, Outcome]) -> None:
    run, outcome = measured
    assert not list(run.glob("*faithfulness*"))
    lines = outcome.out.splitlines()
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []
    assert not [line for line in lines if "…" in line]
    for name in (*list_methods(), "random"):
        of_map = [line for line in lines if line.startswith(f"{name} ")]
        assert sum(line.count("(") == 2 for line in of_map) == 1  # both intervals
    assert sum("*" in line for line in lines if line.split(" ")[0] in list_methods()) >= 1
