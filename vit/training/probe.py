"""The linear probe that a run of pretrained weights starts from."""

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vit.config import Config
from vit.data.dataset import ImageDataset
from vit.model.logits import cut_model
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.features import Features, compute_features
from vit.runtime.arguments import shorten
from vit.runtime.console import build_console
from vit.runtime.numbers import format_percent
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress
from vit.training.data import TrainingData
from vit.training.folds import assign_folds, describe_always_trained, list_always_trained
from vit.training.learning_curve import LearningCurve, measure_learning_curve
from vit.training.linear_probe import LinearProbe, fit_probe
from vit.training.model import set_up_training
from vit.training.validation import build_predictor

_POOLING_NAMES = {"token": "the class token", "avg": "the mean of the patches"}


@dataclass(frozen=True)
class FittedProbe:
    """A probe that was fitted for a run.

    Attributes:
        probe: The probe of the training images.
        description: The chosen readout, its accuracy and the time, for the user.
        curve: Growth of the accuracy with the number of images; in the main process of a new run
            only.
    """

    probe: LinearProbe
    description: str
    curve: LearningCurve | None = None


def uses_probe(config: Config) -> bool:
    """Return whether a run starts from a probe. A run of random weights can't."""
    return bool(config.model.probe) and config.model.init is not None


def is_probe_alone(config: Config) -> bool:
    """Return whether nothing is trained after the probe: its regression is the best head of a
    frozen backbone."""
    return uses_probe(config) and config.model.freeze == "backbone"


def compute_data_features(
    data: TrainingData, images: ImageDataset, model: nn.Module, *, device: torch.device
) -> Features:
    """Compute the features of a run's images at each readout, or read them from the cache."""
    predictor = build_predictor(data, model, device=device)
    return compute_features(predictor, data.decode(images), cache_dir=data.splits.cache_dir)


def fit_to_data(
    config: Config,
    model: VisionTransformer,
    data: TrainingData,
    *,
    device: torch.device,
    measures_curve: bool = True,
) -> FittedProbe:
    """Fit a probe on the training images.

    Args:
        config: Configuration of the run. Its `model.probe` is the number of images, which are
            spread over the classes, or true for all.
        model: Model with the pretrained weights, on its device.
        data: Images of the run.
        device: The model's device.
        measures_curve: Measure the learning curve, too.
    """
    # Images that are decoded while training are decoded here, and unreadable ones are left out.
    dataset = data.decode(_choose_images(data.train, config.model.probe))
    started_at = time.perf_counter()
    features = compute_data_features(data, dataset, model, device=device)
    computed_at = time.perf_counter()
    balanced = data.class_balance == "weights"
    process = current_process()
    folds = assign_folds(dataset.labels, dataset.groups)
    probe = None
    if process.is_main:
        with show_progress("choosing a linear probe"):
            probe = fit_probe(
                features,
                dataset.labels,
                num_classes=len(dataset.class_names),
                balanced=balanced,
                folds=folds,
                groups=dataset.groups,
            )
    # Other processes take the main process's probe, because their libraries may round differently.
    probe = process.broadcast(probe)
    assert probe is not None

    depth, pool = probe.readout
    text = (
        f"features of block {depth} of {len(model.blocks)}, {_POOLING_NAMES[pool]},"
        f" C={probe.strength:.2g}"
    )
    always_trained = list_always_trained(folds, dataset.labels)
    names = [dataset.class_names[label] for label in always_trained]
    if probe.top1 is not None:
        text += f"; top-1 in cross-validation {format_percent(probe.top1, len(dataset))}"
        text += describe_always_trained(names)
    elif probe.map is not None:
        mean = format_percent(probe.map, len(dataset))
        text += f"; mean average precision in cross-validation {mean}"
    elif names:
        listed = shorten(", ".join(names))
        text += f"; no cross-validation, because of one group or image: {listed}"
    count = f"{len(dataset):,}"
    if len(dataset) < len(data.train):
        count += f" of {len(data.train):,}"
    text += (
        f" ({count} training images; features {computed_at - started_at:.0f} s,"
        f" regressions {time.perf_counter() - computed_at:.0f} s)"
    )
    curve = None
    if process.is_main and measures_curve:
        curve = _measure_curve(features, dataset, probe, balanced=balanced)
    return FittedProbe(probe, text, curve)


def _measure_curve(
    features: Features, dataset: ImageDataset, probe: LinearProbe, *, balanced: bool
) -> LearningCurve | None:
    """Measure the learning curve of the probe; None for several labels an image."""
    if dataset.is_multilabel:
        return None
    try:
        with show_progress("learning curve"):
            return measure_learning_curve(
                features[probe.readout].numpy().astype(np.float64),
                dataset.labels,
                strength=probe.strength,
                class_weight="balanced" if balanced else None,
                groups=dataset.groups,
            )
    except Exception as error:  # it only informs, and must not cost the run
        message = f"warning: no learning curve: {type(error).__name__}: {error}"
        build_console(stderr=True).print(message, style="yellow", soft_wrap=True)
        return None


def build_probed_model(
    config: Config, model: VisionTransformer, probe: LinearProbe
) -> VisionTransformer:
    """Build the model that ends at the probe's block and has the probe as its head, to be trained
    as the configuration says."""
    probed = cut_model(
        model,
        probe.readout,
        weight=torch.from_numpy(probe.weight).float(),
        bias=torch.from_numpy(probe.bias).float(),
    )
    set_up_training(config, probed)
    return probed


def _choose_images(dataset: ImageDataset, max_images: int | bool) -> ImageDataset:
    """Choose up to a number of images, which are spread over the classes; all for true."""
    # True is also the number 1 in Python.
    if max_images is True or max_images >= len(dataset):
        return dataset
    # the first image of each class in a random order, then the second of each class, and so on
    shuffled = np.random.default_rng(0).permutation(len(dataset))
    seen: Counter[int] = Counter()
    places = np.zeros(len(dataset), dtype=np.int64)
    for place, label in enumerate(dataset.strata[shuffled].tolist()):
        places[place] = seen[label]
        seen[label] += 1
    return dataset.subset(np.sort(shuffled[np.argsort(places, kind="stable")[:max_images]]))
