"""`vit compare` as a person meets it."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.records import write_evaluation
from vit.cli.main import main

RANKS = np.array([0, 0, 0, 1, 2, 0, 1, 0] * 50)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = 0
    try:
        main(["compare", *map(str, arguments)])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def test_two_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    better = np.where(np.arange(len(RANKS)) % 8 == 3, 0, RANKS)
    code, out, _ = run(
        capsys, write_evaluation(tmp_path, "a", RANKS), write_evaluation(tmp_path, "b", better)
    )
    assert code == 0
    assert "b against a: top-1 +0.1250" in out
    assert "beyond chance" in out
    assert "50 images that only b gets right: test/0003.png, test/0011.png" in out
    assert "0 images that only a gets right" in out
    assert "class 3: 0.5000 → 1.0000 of 100" in out


def test_seeds_are_folded_and_their_distance_shown(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    worse = RANKS.copy()
    worse[:2] = 1
    seeds = [
        write_evaluation(tmp_path, f"s{seed}", ranks, recipe="r", seed=seed)
        for seed, ranks in enumerate((RANKS, worse))
    ]
    code, out, _ = run(capsys, *seeds, "--output", tmp_path / "comparison")
    assert code == 0
    assert "s0 + s1" in out
    assert "± 0.0035" in out  # |0.625 - 0.62| / √2
    assert "s1 against s0" in out
    assert "within chance" in out
    saved = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert saved["groups"][0]["seeds"] == [0, 1]


def test_other_images_and_missing_evaluations_are_refused_in_a_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    a = write_evaluation(tmp_path, "a", RANKS)
    b = write_evaluation(tmp_path, "b", RANKS, fingerprint="f" * 64)
    for arguments, sentence in (
        ([a, b], "different images"),
        ([a], "two or more"),
        ([a, tmp_path / "none"], "holds no evaluation.json"),
    ):
        code, _, error = run(capsys, *arguments)
        assert code == 2
        assert len(error.strip().splitlines()) == 1
        assert sentence in error
