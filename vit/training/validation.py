"""Validation while a model trains: the numbers that `vit evaluate` would report."""

from functools import partial

import torch
from torch import nn

from vit.evaluation.metrics import compute_metrics, score_logits
from vit.prediction.batch_predictor import BatchPredictor, choose_batch_size, read_dataset
from vit.prediction.probabilities import Float32s
from vit.runtime.device import choose_precision
from vit.training.data import TrainingData


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


def predict_validation(data: TrainingData, model: nn.Module, device: torch.device) -> Float32s:
    """Compute the logits of the validation images, [n, C]."""
    assert data.validation is not None
    read = partial(read_dataset, data.validation, data.preprocess)
    return build_predictor(data, model, device=device).predict(read, count=len(data.validation))


def list_measures(data: TrainingData) -> tuple[str, ...]:
    """Return the names of the measures but the loss, first the fraction of right images."""
    if data.train.is_multilabel:
        return ("exact_match", "macro_f1", "map")
    return ("top1", "macro_f1")


def validate(data: TrainingData, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Measure a model on the validation images. Without any, there are no measures."""
    if data.validation is None:
        return {}
    scores = score_logits(predict_validation(data, model, device), data.validation.labels)
    metrics = compute_metrics(scores)
    return {name: metrics[name] for name in ("loss", *list_measures(data))}
