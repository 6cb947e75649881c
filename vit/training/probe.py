"""The linear probe that a run of pretrained weights starts from."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float

from vit.config import Config
from vit.data.dataset import ImageDataset
from vit.model.logits import cut_model
from vit.model.model_file import ModelFile
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import build_to_fit
from vit.prediction.features import Features, compute_features
from vit.runtime.arguments import shorten
from vit.runtime.console import build_console
from vit.runtime.numbers import format_percent
from vit.runtime.processes import current_process
from vit.runtime.products import find_product
from vit.runtime.progress import show_progress
from vit.training.data import TrainingData
from vit.training.folds import assign_folds, describe_always_trained, list_always_trained
from vit.training.linear_probe import LinearProbe, fit_probe
from vit.training.model import set_up_training
from vit.training.validation import build_predictor

_POOLING_NAMES = {"token": "the class token", "avg": "the mean of the patches"}


class ProbeMeasurement(Protocol):
    """A product's measurement of a probe, such as its learning curve."""

    def save(self, directory: Path) -> None:
        """Write its file into a run's directory."""

    def describe(self) -> str:
        """Return the result in a sentence."""


@dataclass(frozen=True)
class FittedProbe:
    """A probe and the time that it took.

    Attributes:
        probe: The probe of the training images.
        depth: Blocks of the model that it was fitted on.
        num_images: Images that it was fitted on.
        num_training_images: Training images, from which those were chosen.
        features: Features that its head reads, of the images that it was fitted on, float32 [n, D].
        feature_seconds: Seconds of the forward pass, or of reading its results from the cache.
        fit_seconds: Seconds of the regressions.
        always_trained: Classes that cross-validation doesn't measure. See `assign_folds`.
        curve: Growth of the accuracy with the number of images; in the main process only.
    """

    probe: LinearProbe
    depth: int
    num_images: int
    num_training_images: int
    features: Float[np.ndarray, "n D"]
    feature_seconds: float
    fit_seconds: float
    always_trained: tuple[str, ...] = ()
    curve: ProbeMeasurement | None = None

    def describe(self) -> str:
        """The chosen readout, its accuracy and the time, for the user."""
        depth, pool = self.probe.readout
        text = f"features of block {depth} of {self.depth}, {_POOLING_NAMES[pool]}, C={self.probe.strength:.2g}"
        if self.probe.top1 is not None:
            text += (
                f"; top-1 in cross-validation {format_percent(self.probe.top1, self.num_images)}"
            )
            text += describe_always_trained(self.always_trained)
        elif self.probe.map is not None:
            mean = format_percent(self.probe.map, self.num_images)
            text += f"; mean average precision in cross-validation {mean}"
        elif self.always_trained:
            names = shorten(", ".join(self.always_trained))
            text += f"; no cross-validation, because of one group or image: {names}"
        count = f"{self.num_images:,}"
        if self.num_images < self.num_training_images:
            count += f" of {self.num_training_images:,}"
        text += f" ({count} training images; features {self.feature_seconds:.0f} s,"
        return f"{text} regressions {self.fit_seconds:.0f} s)"


def uses_probe(config: Config) -> bool:
    """Return whether a run starts from a probe. A run of random weights can't."""
    return bool(config.model.probe) and config.model.init is not None


def is_probe_alone(config: Config) -> bool:
    """Return whether nothing is trained after the probe: its regression is the best head of a
    frozen backbone."""
    return uses_probe(config) and config.model.freeze == "backbone"


def fit_to_data(
    config: Config,
    model: VisionTransformer,
    data: TrainingData,
    *,
    device: torch.device,
) -> FittedProbe:
    """Fit a probe on the training images.

    Args:
        config: Configuration of the run. Its `model.probe` is the number of images, which are
            spread over the classes, or true for all.
        model: Model with the pretrained weights, on its device.
        data: Images of the run.
        device: The model's device.
    """
    # Images that are decoded while training are decoded here, and unreadable ones are left out.
    dataset = data.decode(_choose_images(data.train, config.model.probe))
    started_at = time.perf_counter()
    predictor = build_predictor(data, model, device=device)
    features = compute_features(predictor, dataset, cache_dir=data.splits.cache_dir)

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
    fit_seconds = time.perf_counter() - computed_at

    curve = None
    if process.is_main:
        curve = _measure_curve(features, dataset, probe, balanced=balanced)
    always_trained = list_always_trained(folds, dataset.labels)
    return FittedProbe(
        probe,
        depth=len(model.blocks),
        num_images=len(dataset),
        num_training_images=len(data.train),
        features=features[probe.readout].numpy(),
        feature_seconds=computed_at - started_at,
        fit_seconds=fit_seconds,
        always_trained=tuple(dataset.class_names[label] for label in always_trained),
        curve=curve,
    )


def _measure_curve(
    features: Features, dataset: ImageDataset, probe: LinearProbe, *, balanced: bool
) -> ProbeMeasurement | None:
    measure = find_product("learning curve")
    if measure is None:
        return None
    try:
        with show_progress("learning curve"):
            curve: ProbeMeasurement = measure(
                features,
                dataset.labels,
                probe,
                class_names=dataset.class_names,
                groups=dataset.groups,
                balanced=balanced,
            )
        return curve
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


def rebuild_probed_model(config: Config, content: ModelFile, *, origin: str) -> VisionTransformer:
    """Build the model of a run's model file, which ends at the probe's block. Its weights are the
    probe's until a better model is found.

    Args:
        config: Configuration of the run.
        content: The model file.
        origin: Its path, for messages.
    """
    architecture = dict(content.metadata["architecture"])
    architecture["drop_path_rate"] = config.model.drop_path_rate
    model = build_to_fit(architecture, content.weights, origin=origin)
    model.load_state_dict(content.weights)
    set_up_training(config, model)
    return model


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
