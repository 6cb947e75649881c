"""Validation while a model trains: the numbers that `vit evaluate` would report."""

from collections.abc import Callable

import torch
from torch import nn

from vit.build.data import Data
from vit.evaluation.metrics import Scores, compute_metrics, score_logits
from vit.evaluation.predictor import Predictor, choose_batch_size
from vit.runtime.device import Precision
from vit.training.parallel import ShardedLogits, is_sharded
from vit.training.plan import Validation


def build_evaluate(
    data: Data, *, device: torch.device, precision: Precision, last: list[Scores]
) -> Callable[[nn.Module], Validation] | None:
    """A function from a model to its measures on the validation images, to be called in all processes; None without
    such images. `last` then holds the scores of the last call alone."""
    preprocess, num_classes = data.preprocess, len(data.train.class_names)
    if data.validation is None:
        return None

    def evaluate(model: nn.Module) -> Validation:
        dataset = data.decode_validation()
        images, labels = dataset.images, dataset.labels
        assert images is not None, "validation images are always decoded"
        model = ShardedLogits(model) if is_sharded(model) else model
        predictor = Predictor(model, preprocess, num_classes, choose_batch_size(device), device, precision)
        logits = predictor.predict(lambda start, stop: preprocess.crop(images[start:stop]), count=len(labels))
        last[:] = [scores := score_logits(logits, labels)]
        macro_f1 = compute_metrics(scores)["macro_f1"]
        return Validation(float(scores.loss.mean()), float(scores.correct.mean()), macro_f1)

    return evaluate
