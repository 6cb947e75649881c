"""What is written can be read again, and what is wrong with a file is said."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.conftest import MakeEvaluation
from tests.evaluation.records import make_evaluation as make_made_up
from vit.evaluation.metrics import compute_metrics, score_logits
from vit.evaluation.result import Evaluation, find_evaluation
from vit.runtime.files import format_json, write_atomically

RANKS = np.array([0, 1, 0, 3])


def load(path: Path) -> Evaluation:
    return Evaluation.model_validate_json(path.read_bytes())


def test_the_latest_evaluation_of_a_model_survives_its_file(
    make_evaluation: MakeEvaluation, tmp_path: Path
) -> None:
    sha256 = "b" * 64
    evaluation = load(make_evaluation("a", RANKS, model_sha256=sha256) / "evaluation.json")
    for version in ("", '"schema_version": 2, '):
        (tmp_path / f"old{version[:1]}").mkdir()
        (tmp_path / f"old{version[:1]}" / "evaluation.json").write_text(
            "{" + version + '"top1": 0.5}'
        )
    make_evaluation("other", RANKS)
    assert find_evaluation(str(tmp_path), sha256) == evaluation
    assert find_evaluation(str(tmp_path), "c" * 64) is None


def read_predictions(directory: Path) -> list[dict[str, str]]:
    with (directory / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_keep_every_digit_and_odd_names(make_evaluation: MakeEvaluation) -> None:
    rows = read_predictions(make_evaluation("a", RANKS))
    assert rows[3]["path"] == "test/0003.png"
    assert [row["label"] for row in rows] == ["class 0", "class 1", "class 2", "class 3"]
    assert rows[0]["predicted"] == "class 0"
    exact = np.log(np.exp(1.0) + 3) - 1  # cross-entropy of the logits 1, 0, 0, 0
    assert float(rows[0]["loss"]) == pytest.approx(exact, abs=1e-15)
    # the fewest digits that give the float32 back
    expected = np.exp([1, 0, 0, 0]) / (np.e + 3)
    for index, value in enumerate(expected):
        assert rows[0][f"probability of class {index}"] == str(np.float32(value))


@pytest.mark.parametrize(
    ("num_right", "count", "said", "guess"),
    [
        (4, 16, "4 of 16 images are classified correctly (25 %; ", "That may be no"),
        (449, 450, "449 of 450 images are classified correctly (99.8 %; ", "By comparison, "),
    ],
)
def test_the_accuracy_is_a_plain_sentence_beside_guessing(
    num_right: int, count: int, said: str, guess: str
) -> None:
    labels = np.arange(count) % 4
    predicted = np.where(np.arange(count) < num_right, labels, (labels + 1) % 4)
    evaluation = make_made_up(score_logits(np.eye(4, dtype=np.float32)[predicted], labels))
    assert evaluation.describe_accuracy().startswith(said)
    assert "most frequent class gives 25" in evaluation.describe_guessing()
    assert evaluation.describe_guessing().startswith(guess)
    assert "Top-5 accuracy" not in [row[0] for row in evaluation.list_rows()]


def test_a_logit_of_minus_infinity_leaves_the_file_json(tmp_path: Path) -> None:
    logits = np.array([[-np.inf, 0.0], [1.0, 0.0]], dtype=np.float32)
    metrics = compute_metrics(score_logits(logits, np.array([0, 0])))
    assert np.isfinite(metrics["loss"])
    assert metrics["loss"] > 300
    marks = np.array([[True, False], [True, True]])
    metrics = compute_metrics(score_logits(logits, marks))
    write_atomically(tmp_path / "metrics.json", format_json(metrics))
    assert not {"Infinity", "NaN"} & set(
        re.findall(r"[A-Z]\w+", (tmp_path / "metrics.json").read_text())
    )
