"""Temperature scaling finds the temperature that the logits were spoilt by."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import expit, log_softmax, softmax

import vit
from tests.evaluation.conftest import MakePredictions
from vit.bundle import Bundle
from vit.evaluation.calibration import fit_temperature


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_the_temperature_undoes_a_factor(make_predictions: MakePredictions, factor: float) -> None:
    logits, labels = make_predictions(20_000)
    spoilt = (factor * logits).astype(np.float32)
    assert fit_temperature(spoilt, labels) == pytest.approx(factor, rel=0.03)


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


def test_an_evaluation_measures_at_the_temperature(tiny_bundle: Bundle) -> None:
    heated = replace(tiny_bundle, metadata={**tiny_bundle.metadata, "temperature": 3.0})
    result = vit.evaluate(heated, num_examples=0)
    log_probabilities = log_softmax(result.logits.astype(np.float64) / 3, axis=1)
    expected = -log_probabilities[np.arange(len(result.images)), result.images.labels].mean()
    assert result.evaluation.metrics["loss"] == pytest.approx(expected, abs=1e-6)
