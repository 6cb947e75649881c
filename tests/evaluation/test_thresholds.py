"""Thresholds have the rates of scikit-learn, and keep on new images what they promise."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, f1_score, precision_recall_curve, roc_auc_score

import vit
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.evaluation.images import EvaluationSet
from vit.evaluation.result import EvaluationResult
from vit.evaluation.thresholds import (
    choose_operating_point,
    choose_threshold,
    measure_thresholds,
    parse_rule,
)
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.probabilities import Bools, Floats, Ints

NAMES = ("cat", "dog")


def make_validation(labels: np.ndarray) -> EvaluationSet:
    """Images of which nothing but labels and groups is read."""
    digests = np.random.default_rng(1).integers(2**63, size=len(labels), dtype=np.uint64)
    dataset = SimpleNamespace(
        digests=digests, split="validation", fingerprint="a" * 64, groups=None
    )
    ids = tuple(map(str, range(len(labels))))
    return EvaluationSet(dataset, ids, labels, Preprocess((8, 8)))  # type: ignore[arg-type]


def choose(text: str, probabilities: Floats, labels: Bools, groups: Ints | None = None) -> float:
    clusters = np.arange(len(labels)) if groups is None else groups
    return choose_threshold(probabilities, labels, parse_rule(text, NAMES), clusters)


def draw(rng: np.random.Generator, count: int) -> tuple[Floats, Bools]:
    labels = rng.random(count) < 0.2
    return 1 / (1 + np.exp(-rng.normal(2.0 * labels - 1, 1.0))), labels


def test_rules_worked_by_hand() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    labels = np.array([0, 0, 1, 0, 1, 0, 1, 1, 1], dtype=bool)
    # of 5 positives and a new one, the lowest may be missed: rank 1 of 6 is at most 0.2
    assert choose("sensitivity=0.8", probabilities, labels) == pytest.approx(0.25)
    assert choose("sensitivity=0.6", probabilities, labels) == pytest.approx(0.45)
    # the highest of 4 negatives is 0.6: a new one exceeds it once in 5
    assert choose("specificity=0.8", probabilities, labels) == pytest.approx(0.65)
    assert choose("specificity=0.6", probabilities, labels) == pytest.approx(0.45)
    # 0.25: 5 hits and 2 alarms, with a new alarm 5 of 8; 0.65: 3 of 4
    assert choose("precision=0.6", probabilities, labels) == pytest.approx(0.25)
    assert choose("precision=0.7", probabilities, labels) == pytest.approx(0.65)
    # 0.65: 3 hits, 2 missed; 0.25: 5 hits, 2 alarms, which is the best F1
    assert choose("f1", probabilities, labels) == pytest.approx(0.25)
    # nine groups of three equal images count as nine images
    triples = [np.repeat(values, 3) for values in (probabilities, labels, np.arange(9))]
    assert choose("sensitivity=0.8", *triples) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sensitivity=1.5", "sensitivity=1.5 is no rule; write .* above 0 and below 1"),
        ("sensitivity", "is no rule"),
        ("specificity=nan", "is no rule"),
        ("precision=1e-", "is no rule"),
        ("cost=10:1", "cost=10:1 is no rule; write sensitivity=0.95"),
        ("f1=0.3", "is no rule"),
        ("", "is no rule"),
        ("fox:f1", "fox is not one of the classes cat, dog"),
        ("dog:f2", "is no rule"),
    ],
)
def test_a_wrong_rule_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(text, NAMES)
    with pytest.raises(ValueError, match=r"f1 needs the class .*, such as cat:f1; the classes are"):
        parse_rule("f1", (*NAMES, "fox"))
    assert parse_rule("a:b:precision=0.5", ("a:b",)).label == "a:b"
    assert parse_rule("f1", (*NAMES, "fox"), is_multilabel=True).label is None


def test_too_few_images_are_explained() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) < 18
    probabilities = rng.random(40)
    with pytest.raises(ValueError, match=r"18 images with positive are too few .*, 19 are needed"):
        choose("sensitivity=0.95", probabilities, labels)
    with pytest.raises(ValueError, match=r"too few .*, 38 are needed"):
        choose("sensitivity=0.95", probabilities, labels, np.arange(40) // 2)
    with pytest.raises(ValueError, match="no threshold has a precision of 99 %; up to"):
        choose("precision=0.99", probabilities, labels)
    with pytest.raises(ValueError, match="none of them has positive"):
        choose("f1", probabilities, np.zeros(40, dtype=bool))
    with pytest.raises(ValueError, match="without positive have a probability of 100 %"):
        choose("specificity=0.9", np.ones(40), labels)


def test_each_label_has_its_threshold_and_a_class_is_found(tiny_bundle: Bundle) -> None:
    rng = np.random.default_rng(3)
    marks = rng.random((60, 2)) < (0.5, 0.1)
    marks[:, 1] = np.arange(60) < 5
    logits = (2.0 * marks + rng.standard_normal((60, 2))).astype(np.float32)
    labels = replace(tiny_bundle, class_names=NAMES, data={"task": "multilabel"})
    rule = parse_rule("sensitivity=0.9", NAMES, is_multilabel=True)
    point, sentences = choose_operating_point(labels, rule, make_validation(marks), logits)
    assert list(point.thresholds) == ["cat"]
    assert "dog is predicted from 50 % on: 5 images with dog are too few for" in sentences[1]
    with pytest.raises(ValueError, match=r"on 60 images \(validation\): 5 images with dog are too"):
        choose_operating_point(
            labels, parse_rule("dog:sensitivity=0.9", NAMES), make_validation(marks), logits
        )
    # of two classes the rarer one; the temperature counts
    classes = replace(tiny_bundle, class_names=NAMES, metadata={"temperature": 2.0})
    validation = make_validation(marks[:, 1].astype(int))
    point, _ = choose_operating_point(classes, parse_rule("f1", NAMES), validation, logits)
    ((name, threshold),) = point.thresholds.items()
    margins = (logits[:, 1] - logits[:, 0]).astype(float) / 2
    assert name == "dog"
    assert threshold == choose("f1", 1 / (1 + np.exp(-margins)), marks[:, 1])


def test_f1_is_the_best_of_scikit_learns_curve() -> None:
    probabilities, labels = draw(np.random.default_rng(1), 300)
    precision, recall, _ = precision_recall_curve(labels, probabilities)
    best = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
    threshold = choose("f1", probabilities, labels)
    assert f1_score(labels, probabilities >= threshold) == pytest.approx(best, abs=1e-12)


def test_promises_hold_on_average_on_new_images() -> None:
    rng = np.random.default_rng(2)
    # so many that the rates of a threshold are exact
    others, other_labels = draw(rng, 20_000)
    rates: dict[str, list[float]] = {"sensitivity": [], "specificity": [], "precision": []}
    for _ in range(200):
        probabilities, labels = draw(rng, 200)
        for name, value in (("sensitivity", 0.9), ("specificity", 0.9), ("precision", 0.6)):
            is_found = others >= choose(f"{name}={value}", probabilities, labels)
            of = {"sensitivity": other_labels, "specificity": ~other_labels, "precision": is_found}
            right = ~is_found if name == "specificity" else is_found & other_labels
            rates[name].append(float(right[of[name]].mean()))
    # the mean of 200 rates; its standard error is 0.003, 0.002 and 0.005
    assert 0.9 - 0.009 <= np.mean(rates["sensitivity"]) <= 0.93
    assert 0.9 - 0.006 <= np.mean(rates["specificity"]) <= 0.92
    assert 0.6 - 0.015 <= np.mean(rates["precision"]) <= 0.65


def test_rates_worked_by_hand() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    labels = np.array([0, 0, 0, 0, 1, 0, 1, 1, 1, 1], dtype=bool)
    first, *others = measure_thresholds(probabilities, labels, np.arange(10), threshold=0.65)
    assert (first.sensitivity, first.specificity) == (0.8, 1.0)
    assert first.sensitivity_interval == pytest.approx((0.2836, 0.9949), abs=1e-4)
    rows = {row.rule: row for row in others}
    # of five, none may be on the wrong side of 90 %
    assert rows["specificity=0.9"].threshold == pytest.approx(0.65)
    assert rows["specificity=0.9"].sensitivity == 0.8
    assert rows["sensitivity=0.95"].threshold == pytest.approx(0.45)
    assert rows["sensitivity=0.95"].specificity == 0.8
    # the threshold of an image of 100 % doesn't exist
    rules = [
        row.rule for row in measure_thresholds(np.ones(4), labels[3:7], np.arange(4), threshold=1)
    ]
    assert rules == ["", "sensitivity=0.9", "sensitivity=0.95"]
    assert measure_thresholds(probabilities, labels | True, np.arange(10), threshold=0.5) == []


def test_images_without_the_label_may_be_certain() -> None:
    """A float64 is 1 from a logit of 37 on, whatever the label."""
    labels = np.arange(1100) < 100
    probabilities = np.where(labels, 0.9, 0.2)
    # at 95 % specificity and at fewer, also where more than 10 % are certain
    for num_certain in (45, 60, 150):
        probabilities[-num_certain:] = 1.0
        rows = measure_thresholds(probabilities, labels, np.arange(1100), threshold=0.5)
        assert all(0 <= row.specificity <= 1 for row in rows)
        assert rows[0].specificity == pytest.approx(1 - num_certain / 1000)


def evaluate(labels: Ints, *, rule: str | None = None, sharpness: float = 1.0) -> EvaluationResult:
    """Measure a model that reads the red channel on images whose red is the label, with noise."""
    rng = np.random.default_rng(4)
    level = 128 + sharpness * 30 * (labels - 0.5) + rng.normal(0, 30, len(labels))
    pixels = np.repeat(level.clip(0, 255).astype(np.uint8), 8 * 8 * 3).reshape(-1, 8, 8, 3)
    model = VisionTransformer(
        img_size=8, patch_size=4, num_classes=2, embed_dim=16, depth=1, num_heads=2
    )
    bundle = vit.Bundle.from_model(
        model, class_names=("good", "<b>|"), preprocess=vit.Preprocess((8, 8))
    )
    if rule is not None:
        point = {"rule": rule, "thresholds": {"<b>|": 0.0}, "num_images": 9}
        bundle = replace(bundle, metadata={**bundle.metadata, "operating_point": point})
    result = vit.evaluate(bundle, dataset=(pixels, labels), device="cpu", precision="float32")
    assert isinstance(result, EvaluationResult)
    return result


def test_two_classes_are_measured_as_one_against_the_rest() -> None:
    labels = np.arange(60) % 4 // 3
    result = evaluate(labels)
    rest = result.evaluation.one_against_rest
    assert rest is not None
    assert rest.name == "<b>|"
    probabilities = result.scores.probabilities[:, 1]
    assert rest.roc_auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
    matrix = confusion_matrix(labels, result.scores.predicted)
    decided = rest.thresholds[0]
    assert decided.threshold == 0.5
    assert decided.sensitivity == matrix[1, 1] / matrix[1].sum()
    assert decided.specificity == matrix[0, 0] / matrix[0].sum()
    page = result.build_files()["report.html"]
    assert isinstance(page, str)
    assert "Thresholds of &lt;b&gt;|" in page
    assert "<b>|" not in page


def test_the_headline_of_an_operating_point_is_its_rates_and_its_work() -> None:
    """Who asks for every defect doesn't ask for the accuracy."""
    evaluation = evaluate(np.arange(60) % 4 // 3, rule="sensitivity=0.95").evaluation
    said = evaluation.describe_accuracy()
    # from a probability of 0 on, all are found and all raise an alarm
    assert said.startswith("15 of 15 images with <b>| are found (100 %; 95 % interval 78–100 %)")
    assert "45 false alarms in 45 other images (100 %)" in said
    assert said.endswith("A person has to look at 60 of 60 images.")
    assert "guessing" not in evaluation.describe_guessing()
    assert "As many images at random would have 100 % of them." in evaluation.describe_guessing()
