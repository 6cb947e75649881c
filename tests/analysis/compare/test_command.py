"""`vit compare`."""

import json
from pathlib import Path

import numpy as np

from tests.conftest import Launcher, SaveModel
from tests.evaluation.records import write_evaluation
from vit.bundle import update_metadata

RANKS = np.array([0, 0, 0, 1, 2, 0, 1, 0] * 50)


def test_two_recipes(cli: Launcher, tmp_path: Path) -> None:
    better = np.where(np.arange(len(RANKS)) % 8 == 3, 0, RANKS)
    outcome = cli.succeed(
        "compare", write_evaluation(tmp_path, "a", RANKS), write_evaluation(tmp_path, "b", better)
    )
    assert "b against a: top-1 +12 percentage points (95 % interval +9 to +16)" in outcome.text
    assert "difference significant (McNemar's exact test, p = 1.8e-15)" in outcome.text
    assert "a true difference of 5 points or more would be found 8 times in 10" in outcome.text
    assert "50 images that only b predicts correctly: test/0003.png, test/0011.png" in outcome.text
    assert "0 images that only a predicts correctly" in outcome.text
    assert "class 3: 50 % → 100 % of 100 images correct" in outcome.text


def test_seeds_are_folded_and_their_distance_shown(cli: Launcher, tmp_path: Path) -> None:
    worse = RANKS.copy()
    worse[:2] = 1
    seeds = [
        write_evaluation(tmp_path, f"s{seed}", ranks, recipe="r", seed=seed)
        for seed, ranks in enumerate((RANKS, worse))
    ]
    outcome = cli.succeed("compare", *seeds, "--output", tmp_path / "comparison")
    assert "s0 + s1" in outcome.text
    assert "± 0.35 %" in outcome.text  # |0.625 - 0.62| / √2
    assert "s1 against s0" in outcome.text
    assert "difference not significant (McNemar's exact test, p = 0.5)" in outcome.text
    saved = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert saved["groups"][0]["seeds"] == [0, 1]


def test_other_images_and_missing_evaluations_are_refused_in_a_line(
    cli: Launcher, tmp_path: Path
) -> None:
    a = write_evaluation(tmp_path, "a", RANKS)
    b = write_evaluation(tmp_path, "b", RANKS, fingerprint="f" * 64)
    for arguments, sentence in (
        ([a, b], "different images"),
        ([a], "two or more"),
        ([a, tmp_path / "none"], "none does not exist"),
        ([a, tmp_path], "has no evaluation.json"),
    ):
        assert sentence in cli.fail("compare", *arguments)


def test_numbers_that_are_not_finite_are_refused_or_said(cli: Launcher, tmp_path: Path) -> None:
    a, b = (write_evaluation(tmp_path, name, RANKS) for name in ("a", "b"))
    path = b / "evaluation.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"loss": float("nan")}))
    outcome = cli.succeed("compare", a, b)
    assert "nan" not in outcome.text.split()
    assert "b has no loss: the model's outputs are not all finite numbers" in outcome.text
    path.write_text(json.dumps(content | {"top1": float("nan")}))
    assert "top1 is not a number; evaluate again" in cli.fail("compare", a, b)


def test_info_shows_no_nan(cli: Launcher, save_model: SaveModel, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model.safetensors")
    fitted_on = {"loss_before": float("nan")}
    update_metadata(path, {"temperature": 1.5, "temperature_fitted_on": fitted_on})
    out = cli.succeed("info", path).text
    assert "nan" not in out.split()
    assert "– (the file has no finite number here)" in " ".join(out.split())
