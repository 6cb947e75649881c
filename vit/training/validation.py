"""Validation while a model trains: the numbers that `vit evaluate` would report."""

from dataclasses import dataclass

import torch
from torch import nn

from vit.evaluation.metrics import compute_metrics, score_logits
from vit.prediction.predictor import BatchPredictor, choose_batch_size
from vit.prediction.probabilities import Float32s
from vit.runtime.device import choose_precision
from vit.training.data import TrainingData
from vit.training.plan import Validation


def build_predictor(
    data: TrainingData, model: nn.Module, *, device: torch.device
) -> BatchPredictor:
    """Return a predictor of a run's model, under the conditions of the run."""
    return BatchPredictor(
        model=model.eval(),
        preprocess=data.preprocess,
        num_classes=len(data.train.class_names),
        batch_size=choose_batch_size(device),
        device=device,
        precision=choose_precision(data.config.train.precision, device),
    )


@dataclass(frozen=True, eq=False)
class ImageValidator:
    """Measures a model on the validation images.

    Args:
        data: Images of the run, with validation images.
        device: The model's device.
    """

    data: TrainingData
    device: torch.device

    def predict(self, model: nn.Module) -> Float32s:
        """Compute the logits of the validation images, [n, C]."""
        assert self.data.validation is not None
        images = self.data.validation.pixels
        assert images is not None, "validation images are always decoded"
        return build_predictor(self.data, model, device=self.device).predict(
            lambda start, stop: self.data.preprocess.crop(images[start:stop]), count=len(images)
        )

    def validate(self, model: nn.Module) -> Validation:
        """Measure a model. All processes call it."""
        assert self.data.validation is not None
        scores = score_logits(self.predict(model), self.data.validation.labels)
        metrics = compute_metrics(scores)
        if scores.is_multilabel:
            return Validation(
                loss=metrics["loss"],
                top1=metrics["exact_match"],
                macro_f1=metrics["macro_f1"],
                map=metrics["map"],
            )
        return Validation(
            loss=float(scores.loss.mean()),
            top1=float(scores.correct.mean()),
            macro_f1=metrics["macro_f1"],
        )
