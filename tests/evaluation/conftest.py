"""Predictions with known statistics, and the tiny model's images."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.browser import browser
from tests.evaluation.records import write_evaluation
from tests.explanation.conftest import from_timm, ours
from vit.bundle import Bundle
from vit.data.open import open_dataset
from vit.evaluation.images import EvaluationSet, load_images
from vit.prediction.probabilities import Float32s, Ints

__all__ = ["browser", "from_timm", "ours"]

MakePredictions = Callable[..., tuple[Float32s, Ints]]


@pytest.fixture(scope="session")
def make_predictions() -> MakePredictions:
    """Logits whose softmax is the chance of each label: a model that knows how sure it may be."""

    def make(
        count: int = 2000, classes: int = 10, *, sharpness: float = 2.0, seed: int = 0
    ) -> tuple[Float32s, Ints]:
        rng = np.random.default_rng(seed)
        logits = sharpness * rng.standard_normal((count, classes))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        return logits.astype(np.float32), labels

    return make


@pytest.fixture(scope="session")
def bundle(tiny_bundle: Bundle) -> Bundle:
    return tiny_bundle


@pytest.fixture(scope="session")
def images(bundle: Bundle) -> EvaluationSet:
    """The digits' test split."""
    return load_images(bundle, open_dataset("digits"), "test")


MakeEvaluation = Callable[..., Path]


@pytest.fixture
def make_evaluation(tmp_path: Path) -> MakeEvaluation:
    """make_evaluation(name, ranks, …) writes an evaluation directory."""
    return partial(write_evaluation, tmp_path)
