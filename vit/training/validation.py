"""Validation while a model trains: the numbers that `vit evaluate` would report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from vit.data.dataset import choose_evenly
from vit.evaluation.metrics import Scores, compute_metrics, score_logits
from vit.prediction.predictor import BatchPredictor, choose_batch_size
from vit.prediction.probabilities import Float32s, Floats
from vit.runtime.device import choose_precision
from vit.training.data import TrainingData
from vit.training.plan import NO_VALIDATION, SelectBy, Validation

# Largest number of logits that outlast the epochs: 8 MiB in each checkpoint.
_MAX_LOGITS = 1 << 21


@dataclass(eq=False)
class HeldAside:
    """Logits of validation images that did not choose the epoch they are from.

    The images are divided into two halves by hashes of their pixels. Each image has its logits at
    the epoch that the other half alone would have chosen so far. Thresholds of prediction sets and
    a temperature that are found with them are therefore not flattered by the choice.

    Args:
        select_by: Measure of the best model.
        probabilities: Probability of the right class, or of the least probable label of each image,
            [n]; empty before the first validation.
        logits: Logits [k, C] of the images `indices`: all images, or evenly spaced ones.
        best: Best measures of the half without and of the half with the last bit of the hash.
    """

    select_by: SelectBy
    probabilities: Floats = field(default_factory=lambda: np.zeros(0))
    logits: Float32s = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    best: list[Validation] = field(default_factory=list)

    @property
    def indices(self) -> list[int]:
        """The images whose logits are kept, [k]."""
        return choose_evenly(len(self.probabilities), len(self.logits))

    def update(self, scores: Scores, logits: Float32s, digests: np.ndarray) -> None:
        """Take the logits of an epoch for each half whose other half finds the epoch the best.

        Args:
            scores: Scores of all validation images.
            logits: Their logits, [n, C].
            digests: Their hashes, [n].
        """
        if not self.best:
            num_kept = _count_kept(len(scores), logits.shape[1])
            self.probabilities = np.zeros(len(scores))
            self.logits = np.zeros((num_kept, logits.shape[1]), np.float32)
            self.best = [NO_VALIDATION, NO_VALIDATION]
        is_second = digests % 2 == 1
        for number, half in enumerate((~is_second, is_second)):
            # All images may be in one half, for example a single image.
            chosen_by = half
            if not half.any():
                chosen_by = ~half
            validation = measure(scores.subset(chosen_by))
            is_first = self.best[number] == NO_VALIDATION
            if is_first or validation.rank(self.select_by) > self.best[number].rank(self.select_by):
                self.best[number] = validation
                self.probabilities[~half] = scores.label_probability[~half]
                indices = np.array(self.indices)
                is_other = ~half[indices]
                self.logits[is_other] = logits[indices[is_other]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "probabilities": torch.from_numpy(self.probabilities.copy()),
            "logits": torch.from_numpy(self.logits.copy()),
            "best": [tuple(validation) for validation in self.best],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, num_images: int, num_classes: int
    ) -> None:
        """Go back to a state that `state_dict` returned.

        Args:
            state: The state, which may come from a file.
            num_images: Validation images.
            num_classes: Classes of the model.

        Raises:
            RuntimeError: The state is not of these images.
        """
        self.probabilities = state["probabilities"].numpy().copy()
        self.logits = state["logits"].numpy().copy()
        self.best = [Validation(*values) for values in state["best"]]
        shapes = (self.probabilities.shape, self.logits.shape, len(self.best))
        num_kept = _count_kept(num_images, num_classes)
        if shapes not in (((0,), (0, 0), 0), ((num_images,), (num_kept, num_classes), 2)):
            raise RuntimeError("the validation's logits are of other images")
        # NaN comes from a model that has diverged.
        if (self.probabilities < 0).any() or (self.probabilities > 1).any():
            raise RuntimeError("the validation's probabilities are not from 0 to 1")


def _count_kept(num_images: int, num_classes: int) -> int:
    """Return the number of images whose logits outlast the epochs."""
    return min(num_images, max(1, _MAX_LOGITS // num_classes))


def measure(scores: Scores) -> Validation:
    """Return the measures by which an epoch is chosen."""
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


@dataclass(eq=False)
class ImageValidator:
    """Measures a model on the validation images.

    Args:
        data: Images of the run, with validation images.
        device: The model's device.
        held_aside: Logits that outlast the epochs.
        last_scores: Scores of the last evaluation.
    """

    data: TrainingData
    device: torch.device
    held_aside: HeldAside
    last_scores: Scores | None = None

    def validate(self, model: nn.Module, *, warn: Callable[[str], None]) -> Validation:
        """Measure a model. All processes call it; `warn` gets a sentence for each unreadable
        image."""
        dataset = self.data.decoded_validation
        # Images that are decoded in the first call; otherwise the plan of the run names them.
        if self.last_scores is None and self.data.validation is not dataset:
            for name, reason in dataset.unreadable:
                warn(f"skipped validation image {name}: {reason}")

        preprocess = self.data.preprocess
        images = dataset.pixels
        assert images is not None, "validation images are always decoded"
        predictor = build_predictor(self.data, model, device=self.device)
        logits = predictor.predict(
            lambda start, stop: preprocess.crop(images[start:stop]), count=len(dataset.labels)
        )
        self.last_scores = score_logits(logits, dataset.labels)
        self.held_aside.update(self.last_scores, logits, dataset.digests)
        return measure(self.last_scores)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state that a checkpoint holds. See `HeldAside.load_state_dict`."""
        self.held_aside.load_state_dict(
            state,
            num_images=len(self.data.decoded_validation),
            num_classes=len(self.data.train.class_names),
        )
