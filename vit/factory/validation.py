"""Validation while a model trains: the numbers that `vit evaluate` would report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from vit.evaluation.metrics import Floats, Scores, compute_metrics, score_logits
from vit.evaluation.prediction import Predictor, choose_batch_size
from vit.factory.data import TrainingData
from vit.runtime.device import Precision
from vit.training.plan import NO_VALIDATION, SelectBy, Validation
from vit.training.trainer import Validator


@dataclass(eq=False)
class HeldAside:
    """Probabilities of validation images that did not choose the epoch they are from.

    The images are divided by hashes of their pixels. Each has its probability at the epoch that the
    other half alone would have chosen so far: what is found out with them (thresholds of prediction
    sets) is not flattered by the choice, and all of them count.

    Args:
        select_by: the measure of the best model.
    """

    select_by: SelectBy
    # [n], of the right class; none before the first validation
    probabilities: Floats = field(default_factory=lambda: np.zeros(0))
    # of the half without and with the last bit of the hash
    best: list[Validation] = field(default_factory=list)

    def update(self, scores: Scores, digests: np.ndarray) -> None:
        """Take the probabilities of an epoch for the half whose other half finds it the best."""
        if not self.best:
            self.probabilities = np.zeros(len(scores))
            self.best = [NO_VALIDATION, NO_VALIDATION]
        is_second = digests % 2 == 1
        for number, half in enumerate((~is_second, is_second)):
            # all images in one half: that of one image, say
            chosen_by = half if half.any() else ~half
            validation = measure(scores.subset(chosen_by))
            is_first = self.best[number] == NO_VALIDATION
            if is_first or validation.rank(self.select_by) > self.best[number].rank(self.select_by):
                self.best[number] = validation
                self.probabilities[~half] = scores.label_probability[~half]

    def state_dict(self) -> dict[str, Any]:
        """As checkpoints hold it."""
        return {
            "probabilities": torch.from_numpy(self.probabilities.copy()),
            "best": [tuple(validation) for validation in self.best],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` gave."""
        self.probabilities = state["probabilities"].numpy().copy()
        self.best = [Validation(*values) for values in state["best"]]


def measure(scores: Scores) -> Validation:
    """The measures of the epoch's choice."""
    return Validation(
        loss=float(scores.loss.mean()),
        top1=float(scores.correct.mean()),
        macro_f1=compute_metrics(scores)["macro_f1"],
    )


@dataclass(eq=False)
class ImageValidator(Validator):
    """Measures a model on the validation images.

    Args:
        data: with validation images.
        device: of the model.
        precision: of the forward pass.
        held_aside: probabilities that outlast the epochs.
        last_scores: of the last evaluation.
    """

    data: TrainingData
    device: torch.device
    precision: Precision
    held_aside: HeldAside
    last_scores: Scores | None = None

    def validate(self, model: nn.Module, *, warn: Callable[[str], None]) -> Validation:
        dataset = self.data.decoded_validation
        # in the first call, unless they were decoded before: then the plan of the run names them
        if self.last_scores is None and self.data.validation is not dataset:
            for name, reason in dataset.unreadable:
                warn(f"skipped validation image {name}: {reason}")

        preprocess = self.data.preprocess
        images = dataset.pixels
        assert images is not None, "validation images are always decoded"
        predictor = Predictor(
            model,
            preprocess,
            len(dataset.class_names),
            choose_batch_size(self.device),
            self.device,
            self.precision,
        )
        logits = predictor.predict(
            lambda start, stop: preprocess.crop(images[start:stop]), count=len(dataset.labels)
        )
        self.last_scores = score_logits(logits, dataset.labels)
        self.held_aside.update(self.last_scores, dataset.digests)
        return measure(self.last_scores)

    def state_dict(self) -> dict[str, Any]:
        return self.held_aside.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held_aside.load_state_dict(state)
