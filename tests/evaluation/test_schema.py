"""What is written can be read again, and what is wrong with a file is said."""

from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.conftest import MakeEvaluation
from vit.evaluation.schema import Evaluation, load_evaluation, load_predictions, save_evaluation

RANKS = np.array([0, 1, 0, 3])


def test_an_evaluation_survives_the_file(make_evaluation: MakeEvaluation, tmp_path: Path) -> None:
    evaluation = load_evaluation(make_evaluation("a", RANKS) / "evaluation.json")
    save_evaluation(tmp_path / "again.json", evaluation)
    assert load_evaluation(tmp_path / "again.json") == evaluation


def test_every_headline_key_is_there_and_described() -> None:
    properties = Evaluation.model_json_schema()["properties"]
    promised = (
        "schema_version top1 top5 loss macro_f1 macro_precision macro_recall ece brier nll intervals per_class "
        "num_images duplicates_of_training split data model_sha256"
    )
    assert set(promised.split()) <= properties.keys()
    assert properties["ece"]["description"].startswith("expected calibration error")


def test_predictions_keep_every_digit_and_odd_names(make_evaluation: MakeEvaluation) -> None:
    columns = load_predictions(make_evaluation("a", RANKS) / "predictions.csv")
    assert columns["path"][3] == "test/0003.png"
    assert columns["label"] == ["class 0", "class 1", "class 2", "class 3"]
    assert columns["predicted"][0] == "class 0"
    assert [int(rank) for rank in columns["rank"]] == RANKS.tolist()
    exact = np.log(np.exp(1.0) + 3) - 1  # cross-entropy of the logits 1, 0, 0, 0
    assert float(columns["loss"][0]) == pytest.approx(exact, abs=1e-15)


def test_a_wrong_line_is_named(make_evaluation: MakeEvaluation) -> None:
    path = make_evaluation("a", RANKS) / "predictions.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], "only,three,fields", *lines[2:]]))
    with pytest.raises(ValueError, match=r"line 3 has 3 fields instead of 7"):
        load_predictions(path)
    path.write_text("\n".join(lines[1:]))
    with pytest.raises(ValueError, match="line 1 is not path,label"):
        load_predictions(path)


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text('{"top1": 0.5}')
    with pytest.raises(ValueError, match="is not an evaluation of this version"):
        load_evaluation(path)


# top-1 and its interval → the sentence, worked by hand
SENTENCES = {
    (0.6, 0.52, 0.68): "6 in 10 images are classified correctly; between 5 and 7 with",
    (0.7, 0.6, 0.8): "7 in 10 images are classified correctly; between 6 and 8 with",
    (0.917, 0.883, 0.946): "92 in 100 images are classified correctly; between 88 and 95 with",
    (0.97, 0.85, 1.0): "97 in 100 images are classified correctly; between 85 and 100 with",
    (1.0, 0.66, 1.0): "100 in 100 images are classified correctly; between 66 and 100 with",
}


@pytest.mark.parametrize("values", SENTENCES)
def test_the_accuracy_is_a_plain_sentence_beside_its_baselines(
    make_evaluation: MakeEvaluation, values: tuple[float, float, float]
) -> None:
    top1, *interval = values
    path = make_evaluation("a", np.array([0, 1, 2, 3, 0])) / "evaluation.json"
    evaluation = load_evaluation(path)
    evaluation = evaluation.model_copy(
        update={"top1": top1, "intervals": evaluation.intervals | {"top1": tuple(interval)}}
    )
    sentence = evaluation.describe_accuracy()
    assert sentence.startswith(SENTENCES[values])
    # two of the five images are of the first of four classes
    assert sentence.endswith("Always the most frequent class: 40.0%; guessing: 25.0%")
    assert "top5" not in evaluation.list_metrics()
