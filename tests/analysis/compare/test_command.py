"""`vit compare`."""

from pathlib import Path

import numpy as np

from tests.conftest import Launcher
from tests.evaluation.records import write_evaluation

RANKS = np.array([0, 0, 0, 1, 2, 0, 1, 0] * 50)


def test_two_models(cli: Launcher, tmp_path: Path) -> None:
    better = np.where(np.arange(len(RANKS)) % 8 == 3, 0, RANKS)
    folders = [
        write_evaluation(tmp_path, name, ranks)
        for name, ranks in zip("ab", (RANKS, better), strict=True)
    ]
    outcome = cli.succeed("compare", *folders, "--output", tmp_path / "comparison")
    assert "b against a: accuracy +12 percentage points (95 % interval +9 to +16)" in outcome.text
    assert "difference significant (McNemar's exact test, p = 1.8e-15)" in outcome.text
    assert "50 images that only b has right: test/0003.png, test/0011.png" in outcome.text
    assert "0 images that only a has right" in outcome.text
    assert "class 3: 50 % → 100 % of 100 images correct" in outcome.text
    assert (tmp_path / "comparison" / "comparison.json").is_file()


def test_other_images_and_missing_evaluations_are_refused_in_a_line(
    cli: Launcher, tmp_path: Path
) -> None:
    a = write_evaluation(tmp_path, "a", RANKS)
    b = write_evaluation(tmp_path, "b", RANKS, fingerprint="f" * 64)
    for arguments, sentence in (
        ([a, b], "different images"),
        ([a], "two or more"),
        ([a, tmp_path / "none"], "none has no evaluation.json"),
        ([a, tmp_path], "has no evaluation.json"),
    ):
        assert sentence in cli.fail("compare", *arguments)
