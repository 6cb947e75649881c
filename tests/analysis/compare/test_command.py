"""`vit compare`."""

import json
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
    assert "+12.5 percentage points (95 % interval" in outcome.text
    assert "difference significant (McNemar's exact test, p = 1.8e-15)" in outcome.text
    assert "has right (50): test/0003.png, test/0011.png" in outcome.text
    assert "has right (0): none" in outcome.text
    saved = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert saved["only_b"][0] == "test/0003.png"
    assert [saved["a"], saved["b"]] == [str(folder) for folder in folders]
    assert "Missing argument" in cli.fail("compare", folders[0])
