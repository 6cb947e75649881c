"""Temperature scaling finds the temperature that the logits were spoilt by."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

import vit
from tests.evaluation.conftest import MakePredictions
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.evaluation.calibration import (
    calibrate_bundle,
    cross_fit_temperature,
    fit_temperature,
    was_used_for_epoch,
)
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import compute_metrics, score_logits


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_the_temperature_undoes_a_factor(make_predictions: MakePredictions, factor: float) -> None:
    logits, labels = make_predictions(20_000)
    spoilt = (factor * logits).astype(np.float32)
    assert fit_temperature(spoilt, labels) == pytest.approx(factor, rel=0.03)


def test_the_likelihood_is_at_its_highest(make_predictions: MakePredictions) -> None:
    logits, labels = make_predictions(2000, sharpness=3)
    best = fit_temperature(logits, labels)

    def nll(temperature: float) -> float:
        return compute_metrics(score_logits(logits, labels, temperature=temperature))["nll"]

    # the slope at the minimum, by central differences
    assert (nll(best * 1.001) - nll(best / 1.001)) / 0.002 == pytest.approx(0, abs=1e-4)
    assert nll(best) < min(nll(best * 1.1), nll(best / 1.1))


def test_calibration_error_falls_and_predictions_stay(make_predictions: MakePredictions) -> None:
    logits, labels = make_predictions(5000)
    overconfident = (5 * logits).astype(np.float32)
    temperature = fit_temperature(overconfident, labels)
    before = compute_metrics(score_logits(overconfident, labels))
    after = compute_metrics(score_logits(overconfident, labels, temperature=temperature))
    assert after["ece"] < before["ece"] / 5
    assert after["top1"] == before["top1"]


@pytest.mark.parametrize("multilabel", [False, True])
def test_few_images_without_an_error_support_no_certainty(multilabel: bool) -> None:
    """Of 16 images that are all right, the rule of succession expects 17 of 18 to be."""
    logits = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    labels = logits > 0 if multilabel else logits.argmax(axis=1)
    scaled = logits.astype(np.float64) / fit_temperature(logits, labels)
    mean = (
        expit(np.abs(scaled)).mean() if multilabel else softmax(scaled, axis=1).max(axis=1).mean()
    )
    assert mean == pytest.approx(17 / 18, abs=1e-6)
    # a model that is surer itself is left as it is
    assert fit_temperature(100 * logits, labels) == 1.0


def make_validation(labels: np.ndarray) -> EvaluationSet:
    """Images of which the calibration reads nothing but labels and hashes."""
    digests = np.random.default_rng(1).integers(2**63, size=len(labels), dtype=np.uint64)
    dataset = SimpleNamespace(
        digests=digests, split="validation", fingerprint="a" * 64, groups=None
    )
    ids = tuple(map(str, range(len(labels))))
    return EvaluationSet(dataset, ids, labels, Preprocess((8, 8)))  # type: ignore[arg-type]


def test_a_temperature_is_kept_only_where_it_helps_on_other_images(
    make_predictions: MakePredictions, bundle: Bundle
) -> None:
    num_kept = 0
    for seed in range(60):
        # nothing is to be gained: the model is calibrated
        logits, labels = make_predictions(39, seed=seed)
        calibrated, sentence = calibrate_bundle(bundle, make_validation(labels), logits)
        num_kept += calibrated is not bundle
        assert ("not calibrated" in sentence) == (calibrated is bundle)
    assert num_kept <= 3

    logits, labels = make_predictions(200)
    validation = make_validation(labels)
    calibrated, sentence = calibrate_bundle(bundle, validation, 4 * logits)
    assert calibrated.temperature == pytest.approx(4, rel=0.3)
    assert "fitted on 200 images (validation)" in sentence
    assert not calibrated.metadata["temperature_fitted_on"]["out_of_fold"]


def test_images_that_chose_the_epoch_take_the_temperature_of_other_epochs(
    make_predictions: MakePredictions, bundle: Bundle
) -> None:
    logits, labels = make_predictions(200)
    validation = make_validation(labels)
    data = {"splits": {"validation": {"fingerprint": validation.dataset.fingerprint}}}
    chooser = replace(bundle, data=data)
    assert was_used_for_epoch(chooser, validation)
    assert not was_used_for_epoch(bundle, validation)

    # the file of a run that kept none
    unchanged, sentence = calibrate_bundle(chooser, validation)
    assert unchanged is chooser
    assert "not calibrated" in sentence

    fit = cross_fit_temperature(4 * logits, labels, validation.dataset.digests)
    assert fit is not None
    assert fit.helps
    metadata = {**bundle.metadata, "out_of_fold_temperature": fit.model_dump()}
    calibrated, sentence = calibrate_bundle(replace(chooser, metadata=metadata), validation)
    assert calibrated.temperature == fit.temperature == pytest.approx(4, rel=0.3)
    assert "fitted on 200 images (validation, out of fold)" in sentence
    assert calibrated.metadata["temperature_fitted_on"] == {
        "split": "validation",
        "fingerprint": validation.dataset.fingerprint,
        "out_of_fold": True,
        "num_images": 200,
        "loss_before": fit.loss_before,
        "loss_after": fit.loss_after,
        "ece_before": fit.ece_before,
        "ece_after": fit.ece_after,
    }

    # nothing is fitted to what is no number
    broken = logits.copy()
    broken[0, 0] = np.nan
    assert cross_fit_temperature(broken, labels, validation.dataset.digests) is None


def test_a_run_keeps_the_temperature_that_vit_evaluate_takes(tiny_bundle: Bundle) -> None:
    recorded = tiny_bundle.metadata["out_of_fold_temperature"]
    assert recorded["num_images"] == tiny_bundle.data["splits"]["validation"]["num_images"]
    result = vit.evaluate(tiny_bundle, calibrate=True)
    sentence = next(note for note in result.evaluation.notes if "temperature" in note)
    assert f"temperature {recorded['temperature']:.3f}" in sentence
    assert (result.evaluation.calibration is not None) == recorded["helps"]


@pytest.mark.extended
def test_a_run_uses_its_temperature_where_it_helps(tmp_path: Path) -> None:
    """Digits with label smoothing end with probabilities that are too low. Without the temperature
    the weights are the same."""
    overrides = ["train.epochs=30", "train.max_training_features=0"]
    found = {}
    for name, more in (("used", []), ("unused", ["train.calibrate=false"])):
        found[name] = vit.train("digits", output=tmp_path / name, overrides=overrides + more).bundle
    used, unused = found["used"], found["unused"]
    for key, weight in unused.model.state_dict().items():
        assert torch.equal(weight, used.model.state_dict()[key])
    fit = unused.metadata["out_of_fold_temperature"]
    assert fit["helps"]
    assert (used.temperature, unused.temperature) == (fit["temperature"], 1)
    assert used.metadata["temperature_fitted_on"]["split"] == "validation"
    errors = [vit.evaluate(bundle, split="test").evaluation.ece for bundle in (used, unused)]
    assert errors[0] < errors[1] / 2
