"""The result of a training run."""

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from vit.bundle import Bundle, load_bundle
from vit.data.splits import DatasetSplits
from vit.model.find_file import MODEL_FILE
from vit.training.metrics_file import METRICS_FILE, load_metrics


@dataclass(frozen=True)
class TrainingResult:
    """A finished training run and the directory that holds it.

    Args:
        directory: Directory of the run.
        steps: Number of steps.
        seconds: Seconds of training, over all resumptions.
        best_top1: Best accuracy on the validation images, 0 to 1; None without any, and where
            images have several labels.
        num_validation: Number of validation images.
        best_map: Best mean average precision on them, where images have several labels.
        module: Model that was passed from Python, with the weights of the last step.
        passed_images: Images that were passed from Python.
    """

    directory: Path
    steps: int
    seconds: float
    best_top1: float | None
    num_validation: int = 0
    best_map: float | None = None
    module: nn.Module | None = None
    passed_images: DatasetSplits | None = None

    @property
    def model_path(self) -> Path:
        """The model file, with the weights that were best on the validation images."""
        return self.directory / MODEL_FILE

    @cached_property
    def bundle(self) -> Bundle:
        """The best model, on the CPU."""
        bundle = load_bundle(self.model_path, model=copy.deepcopy(self.module))
        return replace(bundle, passed_images=self.passed_images)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary for each epoch, with losses, accuracies, learning rate and speed."""
        return load_metrics(self.directory / METRICS_FILE)
