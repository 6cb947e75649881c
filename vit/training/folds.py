"""A run's configuration and images to a cross-validation, and its file."""

from dataclasses import asdict
from pathlib import Path

import torch

from vit.config import Config
from vit.data.dataset import printable
from vit.prediction.features import compute_features
from vit.runtime.files import write_json
from vit.training.cross_validation import CROSS_VALIDATION_FILE, CrossValidation, cross_validate
from vit.training.data import TrainingData
from vit.training.model import build_model
from vit.training.probe import is_probe_alone
from vit.training.validation import build_predictor

# all images are trained on, by the probe alone
OVERRIDES = (
    "data.validation_fraction=0",
    "data.test_fraction=0",
    "model.probe=true",
    "model.freeze=backbone",
)


def check_folds(config: Config) -> None:
    """Raise ValueError for a run that --folds is not for."""
    if not is_probe_alone(config) or config.data.validation_fraction or config.data.test_fraction:
        raise ValueError(
            "--folds cross-validates a linear probe of all images: it needs --init WEIGHTS, and"
            f" {', '.join(OVERRIDES)} as it sets them"
        )


def run_folds(
    config: Config, data: TrainingData, device: torch.device, *, num_folds: int
) -> CrossValidation:
    """Cross-validate the probe of a run on its images, whose features are in the cache."""
    images = data.decode(data.train)
    model, _ = build_model(config, num_classes=len(images.class_names))
    predictor = build_predictor(data, model.to(device), device=device)
    return cross_validate(
        compute_features(predictor, images, cache_dir=data.splits.cache_dir),
        images.labels,
        ids=[printable(image_id) for image_id in images.ids],
        class_names=images.class_names,
        groups=images.groups,
        num_folds=num_folds,
        balanced=data.class_balance != "none",
    )


def save_folds(result: CrossValidation, directory: Path) -> None:
    """Write cross_validation.json into a run's directory."""
    write_json(directory / CROSS_VALIDATION_FILE, asdict(result))
