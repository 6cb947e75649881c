"""Temperature scaling finds the temperature that the logits were spoilt by."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.evaluation.conftest import MakePredictions
from vit.bundle import Bundle
from vit.data.images import Preprocess
from vit.evaluation.calibration import calibrate, fit_temperature
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


def make_validation(labels: np.ndarray) -> EvaluationSet:
    """Images of which the calibration reads nothing but labels and hashes."""
    digests = np.random.default_rng(1).integers(2**63, size=len(labels), dtype=np.uint64)
    dataset = SimpleNamespace(digests=digests, split="validation", fingerprint="a" * 64)
    return EvaluationSet(dataset, (), labels, Preprocess((8, 8)))  # type: ignore[arg-type]


def test_a_temperature_is_kept_only_where_it_helps_on_other_images(
    make_predictions: MakePredictions, bundle: Bundle
) -> None:
    num_kept = 0
    for seed in range(60):
        # nothing is to be gained: the model is calibrated
        logits, labels = make_predictions(39, seed=seed)
        calibrated, sentence = calibrate(bundle, logits, make_validation(labels))
        num_kept += calibrated is not bundle
        assert ("not calibrated" in sentence) == (calibrated is bundle)
    assert num_kept <= 3

    logits, labels = make_predictions(200)
    validation = make_validation(labels)
    calibrated, sentence = calibrate(bundle, 4 * logits, validation)
    assert calibrated.temperature == pytest.approx(4, rel=0.3)
    assert "fitted on 200 images (validation)" in sentence
    assert "chose" not in sentence
    chooser = replace(bundle, data={"splits": {"validation": {"fingerprint": "a" * 64}}})
    assert "these images also chose the model's epoch" in calibrate(chooser, logits, validation)[1]
