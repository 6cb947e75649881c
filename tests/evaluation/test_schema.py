"""What is written can be read again, and what is wrong with a file is said."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.conftest import MakeEvaluation
from vit.evaluation.metrics import compute_metrics, score_logits
from vit.evaluation.result import Evaluation, load_evaluation
from vit.runtime.files import write_json

RANKS = np.array([0, 1, 0, 3])


def test_an_evaluation_survives_the_file(make_evaluation: MakeEvaluation, tmp_path: Path) -> None:
    evaluation = load_evaluation(make_evaluation("a", RANKS) / "evaluation.json")
    write_json(tmp_path / "again.json", evaluation.model_dump(mode="json"))
    assert load_evaluation(tmp_path / "again.json") == evaluation


def test_every_headline_key_is_there_and_described() -> None:
    properties = Evaluation.model_json_schema()["properties"]
    promised = (
        "schema_version task metrics intervals per_class num_images duplicates_of_training split data"
        " model_sha256"
    )
    assert set(promised.split()) <= properties.keys()


def read_predictions(directory: Path) -> list[dict[str, str]]:
    with (directory / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_keep_every_digit_and_odd_names(make_evaluation: MakeEvaluation) -> None:
    rows = read_predictions(make_evaluation("a", RANKS))
    assert rows[3]["path"] == "test/0003.png"
    assert [row["label"] for row in rows] == ["class 0", "class 1", "class 2", "class 3"]
    assert rows[0]["predicted"] == "class 0"
    assert [int(row["rank"]) for row in rows] == RANKS.tolist()
    exact = np.log(np.exp(1.0) + 3) - 1  # cross-entropy of the logits 1, 0, 0, 0
    assert float(rows[0]["loss"]) == pytest.approx(exact, abs=1e-15)
    # the fewest digits that give the float32 back
    expected = np.exp([1, 0, 0, 0]) / (np.e + 3)
    for index, value in enumerate(expected):
        assert rows[0][f"probability of class {index}"] == str(np.float32(value))
    probabilities = [float(row[f"probability of class {k}"]) for k, row in enumerate(rows)]
    expected = [float(row["label_probability"]) for row in rows]
    assert probabilities == pytest.approx(expected, abs=1e-7)


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    for version in ("", '"schema_version": 2, '):
        path.write_text("{" + version + '"top1": 0.5}')
        message = r"is not an evaluation of this version: it has schema version (None|2), not 3"
        with pytest.raises(ValueError, match=message):
            load_evaluation(path)


# top-1, its interval and the number of images → the start of the sentence, worked by hand
SENTENCES = {
    (
        0.25,
        0.073,
        0.524,
        16,
    ): "4 of 16 images are classified correctly (25 %; 95 % interval 7–52 %)",
    (0.9978, 0.98, 1.0, 450): (
        "449 of 450 images are classified correctly (99.8 %; 95 % interval 98–100 %)"
    ),
    (0.917, 0.9112, 0.9223, 10_000): (
        "9,170 of 10,000 images are classified correctly (91.7 %; 95 % interval 91.1–92.2 %)"
    ),
}


@pytest.mark.parametrize("values", SENTENCES)
def test_the_accuracy_is_a_plain_sentence_with_its_baselines(
    make_evaluation: MakeEvaluation, values: tuple[float, float, float, int]
) -> None:
    top1, low, high, count = values
    path = make_evaluation("a", np.array([0, 1, 2, 3, 0])) / "evaluation.json"
    evaluation = load_evaluation(path)
    # two of five images are of the first of four classes
    per_class = [replace(row, support=row.support * count // 5) for row in evaluation.per_class]
    update = {
        "metrics": evaluation.metrics | {"top1": top1},
        "intervals": evaluation.intervals | {"top1": (low, high)},
        "num_images": count,
        "num_groups": count,
        "per_class": per_class,
    }
    evaluation = evaluation.model_copy(update=update)
    assert evaluation.describe_accuracy() == f"{SENTENCES[values]}."
    comparison = evaluation.describe_guessing()
    assert re.search(r"frequent class gives (40(\.0)?|38|39\.9) %", comparison)
    start = "By comparison, " if low > 0.4 else "That may be no better than guessing: "
    assert comparison.startswith(start if top1 > 0.4 else "That is no better than guessing: ")
    assert evaluation.beats_guessing() == (low > 0.4)
    assert "Top-5 accuracy" not in [row.title for row in evaluation.list_rows()]


def test_a_logit_of_minus_infinity_leaves_the_file_json(tmp_path: Path) -> None:
    logits = np.array([[-np.inf, 0.0], [1.0, 0.0]], dtype=np.float32)
    metrics = compute_metrics(score_logits(logits, np.array([0, 0])))
    assert np.isfinite(metrics["loss"])
    assert metrics["loss"] > 300
    marks = np.array([[True, False], [True, True]])
    metrics = compute_metrics(score_logits(logits, marks))
    write_json(tmp_path / "metrics.json", metrics)
    assert not {"Infinity", "NaN"} & set(
        re.findall(r"[A-Z]\w+", (tmp_path / "metrics.json").read_text())
    )
