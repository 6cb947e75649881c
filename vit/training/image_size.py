"""The image size for pretrained weights: twice their own where a probe is clearly better at it, as
it is for small things in large photos."""

import copy
from typing import Any

import numpy as np

from vit.bundle import Bundle
from vit.config import Config
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.model.model_info import find_image_size
from vit.prediction.batch_predictor import BatchPredictor, compute_features
from vit.runtime.arguments import Size, as_pair
from vit.runtime.device import choose_device
from vit.runtime.numbers import format_percent
from vit.runtime.processes import current_process
from vit.training.data import choose_preprocess
from vit.training.folds import assign_folds
from vit.training.linear_probe import fit_probe
from vit.training.model import build_model
from vit.training.probe import choose_images

# Four times the patches, and the attention between them, take so many times as long.
_COST = 5
# In a fifth of the minutes a CPU of 2 cores computes the features of so many images at both sizes.
_IMAGES_A_MINUTE = 40
# Validation images that it evaluates at the larger size in a fifth of the minutes.
_VALIDATED_A_MINUTE = 60
_MAX_SIDE = 256
_MAX_IMAGES = 300
_MIN_IMAGES = 40
_MIN_IMAGES_A_CLASS = 5
# The mean average precision must gain so much, and a third of what it lacks.
_MIN_GAIN = 0.03
_OWN = "that of the weights"


def choose_image_size(
    config: Config, train: ImageDataset, *, side: int, minutes: float, num_validation: int
) -> tuple[Size, int, str]:
    """Choose the size of training images for a configuration with pretrained weights: their own or
    twice it.

    Args:
        side: Median of the images' shorter sides, in pixels.
        num_validation: Number of validation images.

    Returns:
        The size, how many times as long it takes as the weights' own, and the reason for the user.
    """
    num_classes = len(train.class_names)
    model, pretrained = build_model(config, class_names=train.class_names)
    size = config.data.image_size or find_image_size(model)
    assert size is not None, "models of vit and timm have one"
    own = as_pair(size, name="data.image_size")
    doubled = (2 * own[0], 2 * own[1])
    if side < min(doubled):
        return own, 1, _OWN
    device = choose_device(config.train.device)
    # Several processes would have to compute the features together.
    is_measured = current_process().world_size == 1 and hasattr(model, "set_input_size")
    num_images = _MAX_IMAGES
    if device.type == "cpu":
        num_images = min(int(_IMAGES_A_MINUTE * minutes), num_images)
        is_measured &= max(own) <= _MAX_SIDE and num_validation <= _VALIDATED_A_MINUTE * minutes
    images = choose_images(train, num_images)
    folds = assign_folds(images.labels, images.groups)
    is_measured &= len(images) >= max(_MIN_IMAGES, _MIN_IMAGES_A_CLASS * num_classes)
    if not is_measured or folds.max() < 1:
        return own, 1, f"{_OWN}; {doubled[0]} shows more, in {_COST} times the time"

    def measure(size: tuple[int, int]) -> float:
        """Return the mean average precision of a probe, for which a rare class counts as much as
        a common one."""
        sized: Any = copy.deepcopy(model).to(device)
        sized.set_input_size(size)
        preprocess = choose_preprocess(config.with_data(image_size=size).data, train, pretrained)
        bundle = Bundle.from_model(sized, class_names=train.class_names, preprocess=preprocess)
        predictor = BatchPredictor.from_bundle(bundle, precision=config.train.precision)
        decoded = decode_dataset(images, preprocess, workers=config.data.workers)
        features = compute_features(predictor, decoded)
        folds = assign_folds(decoded.labels, decoded.groups)
        marks = decoded.labels
        if not decoded.is_multilabel:
            marks = marks[:, None] == np.arange(num_classes)
        probe = fit_probe(features, marks, folds, num_classes=num_classes, balanced=True)
        return probe.accuracy or 0.0

    here = measure(own)
    text = f"mean average precision of a probe of {len(images)} photos: "
    text += format_percent(here, len(images))
    if 1 - here < _MIN_GAIN:
        return own, 1, f"{_OWN}; {text}"
    there = measure(doubled)
    text += f" at {own[0]} px, {format_percent(there, len(images))} at {doubled[0]} px"
    if there - here < max(_MIN_GAIN, (1 - here) / 3):
        return own, 1, f"{_OWN}; {text}"
    return doubled, _COST, text


def describe_loss(side: int, image_size: int) -> str:
    """Describe what a size does to small things in images of a shorter side, as the end of a
    sentence; "" where they are reduced to more than a half."""
    if side < 2 * image_size:
        return ""
    left = 8 * image_size / side
    return f"; photos of {side} px are reduced, and a detail of 8 px becomes {left:.1f} px"
