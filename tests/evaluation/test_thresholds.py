"""Thresholds have the rates of scikit-learn, and keep on new images what they promise."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, roc_auc_score

import vit
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.evaluation.images import EvaluationSet
from vit.evaluation.intervals import compute_proportion_interval
from vit.evaluation.result import EvaluationResult
from vit.evaluation.thresholds import (
    Rule,
    choose_operating_point,
    choose_threshold,
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


def read(text: str, names: tuple[str, ...] = NAMES, *, is_multilabel: bool = False) -> Rule:
    bundle: Any = SimpleNamespace(class_names=names, is_multilabel=is_multilabel)
    return parse_rule(text, bundle)


def choose(text: str, probabilities: Floats, labels: Bools, groups: Ints | None = None) -> float:
    clusters = np.arange(len(labels)) if groups is None else groups
    return choose_threshold(probabilities, labels, read(text), clusters)


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
    # the images without the label may all be of one group
    groups = np.where(labels, np.arange(9), 100)
    assert choose("sensitivity=0.8", probabilities, labels, groups) == pytest.approx(0.25)
    # nine groups of three equal images count as nine images
    triples = [np.repeat(values, 3) for values in (probabilities, labels, np.arange(9))]
    assert choose("sensitivity=0.8", *triples) == pytest.approx(0.25)


@pytest.mark.parametrize("text", ["sensitivity=1.5", "sensitivity", "precision=0.0", "cost=10:1"])
def test_a_wrong_rule_is_explained(text: str) -> None:
    with pytest.raises(ValueError, match=f"{text} is no rule; write .* above 0 and below 1"):
        read(text)
    # a class that is not one, and none of three
    for rule, names in (("fox:f1", NAMES), ("f1", (*NAMES, "fox"))):
        with pytest.raises(ValueError, match=r"f1 needs the class .*, such as cat:f1"):
            read(rule, names)
    assert read("a:b:precision=0.5", ("a:b",)).label == "a:b"


@pytest.mark.parametrize(
    ("rule", "groups", "message"),
    [
        # 18 of 18 and a missed one
        ("sensitivity=0.95", None, "18 images with positive .* no sensitivity=0.95, at most 0.947"),
        ("sensitivity=0.95", np.arange(40) // 2, "no sensitivity=0.95, at most 0.9$"),
        ("precision=0.99", None, "allow no precision=0.99, at most"),
    ],
)
def test_too_few_images_are_explained(rule: str, groups: Ints | None, message: str) -> None:
    probabilities, labels = np.random.default_rng(0).random(40), np.arange(40) < 18
    with pytest.raises(ValueError, match=message):
        choose(rule, probabilities, labels, groups)


def test_each_label_has_its_threshold_and_a_class_is_found(tiny_bundle: Bundle) -> None:
    rng = np.random.default_rng(3)
    marks = rng.random((60, 2)) < (0.5, 0.1)
    marks[:, 1] = np.arange(60) < 5
    logits = (2.0 * marks + rng.standard_normal((60, 2))).astype(np.float32)
    labels = replace(tiny_bundle, class_names=NAMES, data={"task": "multilabel"})
    rule = read("sensitivity=0.9", is_multilabel=True)
    decided, sentences = choose_operating_point(labels, rule, make_validation(marks), logits)
    assert list(decided.operating_point["thresholds"]) == ["cat"]
    assert (
        "dog is predicted from 50 % on: 5 images with dog and 55 without allow no" in sentences[1]
    )
    with pytest.raises(ValueError, match=r"on 60 images \(validation\): 5 images with dog and"):
        choose_operating_point(labels, read("dog:sensitivity=0.9"), make_validation(marks), logits)
    # of two classes the rarer one; the temperature counts
    classes = replace(tiny_bundle, class_names=NAMES, metadata={"temperature": 2.0})
    validation = make_validation(marks[:, 1].astype(int))
    decided, _ = choose_operating_point(classes, read("f1"), validation, logits)
    ((name, threshold),) = decided.operating_point["thresholds"].items()
    margins = (logits[:, 1] - logits[:, 0]).astype(float) / 2
    assert name == "dog"
    assert threshold == choose("f1", 1 / (1 + np.exp(-margins)), marks[:, 1])


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
    options: Any = {"device": "cpu", "precision": "float32", "num_examples": 2}
    result = vit.evaluate(bundle, dataset=(pixels, labels), **options)
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
    assert rest.threshold == 0.5
    assert rest.recall == matrix[1, 1] / matrix[1].sum()
    assert rest.specificity == matrix[0, 0] / matrix[0].sum()
    exact = compute_proportion_interval(matrix[0, 0], matrix[0].sum())
    assert rest.specificity_interval == pytest.approx(exact)
    page = result.build_files()["report.html"]
    assert isinstance(page, str)
    assert "Predicted from a probability of 0.5 on" in page
    assert "ROC AUC of &lt;b&gt;|" in page
    assert "<b>|" not in page


def test_the_headline_of_an_operating_point_is_its_rates_and_its_work() -> None:
    """Who asks for every defect doesn't ask for the accuracy."""
    evaluation = evaluate(np.arange(60) % 4 // 3, rule="sensitivity=0.95").evaluation
    said = evaluation.describe_accuracy()
    # from a probability of 0 on, all are found and all raise an alarm
    assert said.startswith("15 of 15 images with <b>| are found (100 %; 95 % interval 78–100 %)")
    assert "45 false alarms in 45 other images (100 %)" in said
    assert said.endswith("A person has to look at 60 of 60 images.")
    assert "as many images at random would have 100 % of them." in evaluation.describe_guessing()
