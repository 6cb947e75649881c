"""Validation while a model trains: the numbers that `vit evaluate` would report."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vit.evaluation.metrics import Scores, compute_metrics, score_logits
from vit.evaluation.prediction import Predictor, choose_batch_size
from vit.factory.data import TrainingData
from vit.runtime.device import Precision
from vit.training.observers import Observer
from vit.training.plan import Validation


@dataclass(eq=False)
class Validator:
    """Measures a model on the validation images; to be called in all processes.

    Args:
        data: with validation images.
        device: of the model.
        precision: of the forward pass.
        observers: are told of each image that turns out to be unreadable.
        last_scores: of the last call.
    """

    data: TrainingData
    device: torch.device
    precision: Precision
    observers: Sequence[Observer]
    last_scores: Scores | None = None

    def __call__(self, model: nn.Module) -> Validation:
        dataset = self.data.decoded_validation
        # in the first call, unless they were decoded before: then the summary of the run names them
        if self.last_scores is None and self.data.validation is not dataset:
            for name, reason in dataset.unreadable:
                for observer in self.observers:
                    observer.on_message(f"skipped validation image {name}: {reason}")

        preprocess = self.data.preprocess
        images = dataset.pixels
        assert images is not None, "validation images are always decoded"
        predictor = Predictor(
            model,
            preprocess,
            len(self.data.train.class_names),
            choose_batch_size(self.device),
            self.device,
            self.precision,
        )
        logits = predictor.predict(
            lambda start, stop: preprocess.crop(images[start:stop]), count=len(dataset.labels)
        )
        scores = score_logits(logits, dataset.labels)
        self.last_scores = scores
        return Validation(
            loss=float(scores.loss.mean()),
            top1=float(scores.correct.mean()),
            macro_f1=compute_metrics(scores)["macro_f1"],
        )
