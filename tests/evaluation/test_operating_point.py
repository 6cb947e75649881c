"""Thresholds that are chosen on held-out images keep their promise on others."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import f1_score, precision_recall_curve

from tests.evaluation.test_calibration import make_validation
from vit.bundle import Bundle
from vit.evaluation.operating_point import choose_operating_point, choose_threshold, parse_rule
from vit.prediction.probabilities import Bools, Floats, Ints

NAMES = ("cat", "dog")


def choose(text: str, probabilities: Floats, labels: Bools, groups: Ints | None = None) -> float:
    clusters = np.arange(len(labels)) if groups is None else groups
    return choose_threshold(probabilities, labels, parse_rule(text, NAMES), clusters)


def test_rules_worked_by_hand() -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    labels = np.array([0, 0, 1, 0, 1, 0, 1, 1, 1], dtype=bool)
    # of 5 positives and a new one, the lowest may be missed: rank 1 of 6 is at most 0.2
    assert choose("sensitivity=0.8", probabilities, labels) == pytest.approx(0.25)
    assert choose("sensitivity=0.6", probabilities, labels) == pytest.approx(0.45)
    # the highest of 4 negatives is 0.6: a new one exceeds it once in 5
    assert choose("specificity=0.8", probabilities, labels) == pytest.approx(0.65)
    assert choose("specificity=0.6", probabilities, labels) == pytest.approx(0.45)
    # 0.65: 3 hits, 2 missed; 0.25: 5 hits, 2 alarms, which is the best F1
    assert choose("f1", probabilities, labels) == pytest.approx(0.25)
    assert choose("cost=10:1", probabilities, labels) == pytest.approx(0.25)
    assert choose("cost=1:10", probabilities, labels) == pytest.approx(0.65)
    # five groups of the same image count as five images
    pairs = [np.repeat(values, 3) for values in (probabilities, labels, np.arange(9))]
    assert choose("sensitivity=0.8", *pairs) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sensitivity=1.5", "sensitivity must be above 0 and below 1, such as sensitivity=0.95"),
        ("sensitivity", "must be above 0"),
        ("specificity=nan", "must be above 0"),
        ("cost=10", "needs the cost of a missed one and that of a false alarm"),
        ("cost=-1:1", "needs the cost"),
        ("f2", "f2 is no rule; write sensitivity=0.95"),
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
    assert parse_rule("a:b:cost=1:5", ("a:b",)).label == "a:b"
    assert parse_rule("f1", (*NAMES, "fox"), is_multilabel=True).label is None


def test_too_few_images_are_explained() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) < 18
    probabilities = rng.random(40)
    with pytest.raises(ValueError, match=r"18 images with positive are too few .*, 19 are needed"):
        choose("sensitivity=0.95", probabilities, labels)
    with pytest.raises(ValueError, match=r"too few .*, 38 are needed"):
        choose("sensitivity=0.95", probabilities, labels, np.arange(40) // 2)
    with pytest.raises(ValueError, match="no threshold has a precision of 99 % beyond noise"):
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


def draw(rng: np.random.Generator, count: int) -> tuple[Floats, Bools]:
    labels = rng.random(count) < 0.2
    return 1 / (1 + np.exp(-rng.normal(2.0 * labels - 1, 1.0))), labels


def test_f1_is_the_best_of_scikit_learns_curve() -> None:
    probabilities, labels = draw(np.random.default_rng(1), 300)
    precision, recall, _ = precision_recall_curve(labels, probabilities)
    best = (2 * precision * recall / np.maximum(precision + recall, 1e-12)).max()
    threshold = choose("f1", probabilities, labels)
    assert f1_score(labels, probabilities >= threshold) == pytest.approx(best, abs=1e-12)


def test_promises_hold_on_new_images() -> None:
    rng = np.random.default_rng(2)
    # so many that the rates of a threshold are exact
    others, other_labels = draw(rng, 20_000)
    rates: dict[str, list[float]] = {}
    for _ in range(200):
        probabilities, labels = draw(rng, 200)
        for text in ("sensitivity=0.9", "specificity=0.9", "precision=0.6"):
            try:
                is_found = others >= choose(text, probabilities, labels)
            except ValueError:
                assert text == "precision=0.6"
                continue
            name = text.partition("=")[0]
            of = {"sensitivity": other_labels, "specificity": ~other_labels, "precision": is_found}
            right = ~is_found if name == "specificity" else is_found & other_labels
            rates.setdefault(name, []).append(float(right[of[name]].mean()))
    # the mean of 200 rates; its standard error is 0.003 and 0.002
    assert 0.9 - 0.009 <= np.mean(rates["sensitivity"]) <= 0.93
    assert 0.9 - 0.006 <= np.mean(rates["specificity"]) <= 0.92
    assert len(rates["precision"]) > 150
    assert np.mean(np.array(rates["precision"]) < 0.6) <= 0.1
