"""Validation while a model trains: the numbers that `vit evaluate` would report."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from vit.evaluation.metrics import Scores, compute_metrics, score_logits
from vit.evaluation.prediction import Predictor, choose_batch_size
from vit.factory.data import TrainingData
from vit.runtime.device import Precision
from vit.training.plan import Validation
from vit.training.trainer import Validator


@dataclass(eq=False)
class ImageValidator(Validator):
    """Measures a model on the validation images.

    Args:
        data: with validation images.
        device: of the model.
        precision: of the forward pass.
        last_scores: of the last evaluation.
    """

    data: TrainingData
    device: torch.device
    precision: Precision
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
        return Validation(
            loss=float(self.last_scores.loss.mean()),
            top1=float(self.last_scores.correct.mean()),
            macro_f1=compute_metrics(self.last_scores)["macro_f1"],
        )
