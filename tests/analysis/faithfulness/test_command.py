"""`vit faithfulness`."""

import json
from pathlib import Path

from tests.conftest import Launcher


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


def test_mistakes_get_a_sentence(cli: Launcher, tiny_run: Path, tmp_path: Path) -> None:
    assert "unknown method 'lrp'" in cli.fail(
        "faithfulness", tiny_run, "--method", "lrp", "--output", tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()
