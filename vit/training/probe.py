"""The linear probe that a run of pretrained weights starts from."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vit.config import Config
from vit.data.dataset import ImageDataset
from vit.model.logits import cut_model
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.batch_predictor import Features, compute_features
from vit.runtime.numbers import format_percent
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress
from vit.training.data import TrainingData
from vit.training.folds import assign_folds, name_always_trained
from vit.training.learning_curve import measure_learning_curve
from vit.training.linear_probe import LinearProbe, fit_probe
from vit.training.model import set_up_training
from vit.training.validation import build_predictor

# Keys of a run that is a linear probe alone.
PROBE_KEYS = {"model.probe": True, "model.freeze": "backbone"}


class FittedProbe(NamedTuple):
    """The probe of a run's training images, its description for the user, its learning curve in
    the main process, and the images with their features."""

    probe: LinearProbe
    description: str
    curve: dict[str, Any] | None
    images: ImageDataset
    features: Features


def uses_probe(config: Config) -> bool:
    """Return whether a run starts from a probe. A run of random weights can't."""
    return bool(config.model.probe) and config.model.init is not None


def is_probe_alone(config: Config) -> bool:
    """Return whether nothing is trained after the probe: its regression is the best head of a
    frozen backbone."""
    return uses_probe(config) and config.model.freeze == "backbone"


def fit_to_data(
    config: Config, model: nn.Module, data: TrainingData, *, device: torch.device
) -> FittedProbe:
    """Fit a probe of a model on a device on the training images, or on as many as `model.probe`
    says."""
    # Images that are decoded while training are decoded here, and unreadable ones are left out.
    images = data.decode(_choose_images(data.train, config.model.probe))
    features = compute_features(build_predictor(data, model, device=device), images)
    balanced = data.class_balance == "weights"
    labels, names = images.labels, images.class_names
    folds = assign_folds(labels, images.groups)
    process = current_process()
    probe = curve = None
    if process.is_main:
        with show_progress("choosing a linear probe"):
            probe = fit_probe(features, labels, folds, num_classes=len(names), balanced=balanced)
            if not images.is_multilabel:
                curve = measure_learning_curve(
                    features[probe.readout].double().numpy(),
                    labels,
                    strength=probe.strength,
                    balanced=balanced,
                    groups=images.groups,
                )
    # Other processes take the main process's probe, because their libraries may round differently.
    probe = process.broadcast(probe)
    assert probe is not None
    depth, pool = probe.readout
    text = f"C={probe.strength:g}, {len(images):,} images"
    if isinstance(model, VisionTransformer):
        text = f"block {depth} of {len(model.blocks)}, pooling {pool}, {text}"
    if probe.accuracy is not None:
        measure = "mean average precision" if images.is_multilabel else "top-1"
        text += f"; {measure} in cross-validation {format_percent(probe.accuracy, len(images))}"
    text += name_always_trained(folds, labels, names)
    if not is_probe_alone(config):
        features = {probe.readout: features[probe.readout]}  # the steps need the memory
    return FittedProbe(probe, text, curve, images, features)


def build_probed_model(config: Config, model: nn.Module, probe: LinearProbe) -> nn.Module:
    """Build the model that ends at the probe's block and has the probe as its head, to be trained
    as the configuration says."""
    weight, bias = (torch.from_numpy(values).float() for values in (probe.weight, probe.bias))
    probed = cut_model(model, probe.readout, weight=weight, bias=bias)
    set_up_training(config, probed)
    return probed


def _choose_images(dataset: ImageDataset, max_images: int | bool) -> ImageDataset:
    """Choose up to a number of images, which are spread over the classes; all for true."""
    # True is also the number 1 in Python.
    if max_images is True or max_images >= len(dataset):
        return dataset
    # the first image of each class in a random order, then the second of each class, and so on
    shuffled = np.random.default_rng(0).permutation(len(dataset))
    strata = dataset.strata[shuffled]
    order = np.argsort(strata, kind="stable")
    places = np.argsort(order) - np.searchsorted(strata, strata, sorter=order)
    return dataset.subset(np.sort(shuffled[np.argsort(places, kind="stable")[:max_images]]))
