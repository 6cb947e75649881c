"""The image size for pretrained weights: the double of their own where a probe is clearly better
on it, as it is for small things in large photos."""

import copy
from functools import partial

from vit.config import Config
from vit.data.cache import decode_dataset
from vit.data.splits import DatasetSplits
from vit.prediction.batch_predictor import BatchPredictor, choose_batch_size, compute_features
from vit.runtime.arguments import Size, as_pair
from vit.runtime.device import choose_device, choose_precision
from vit.runtime.numbers import format_percent
from vit.runtime.processes import current_process
from vit.training.data import choose_preprocess
from vit.training.folds import assign_folds
from vit.training.linear_probe import measure_precision
from vit.training.model import build_model
from vit.training.probe import choose_images

# Time for an image of twice the size, by that for one of the weights' own: four times the patches,
# and attention between them.
_COST = 5
# A fifth of the minutes of a CPU of 2 cores computes the features of so many images at both sizes.
_IMAGES_A_MINUTE = 40
_MIN_IMAGES = 60
_MAX_SIDE = 256
_MAX_IMAGES = 300
# The mean average precision is clearly better if it gains so much, and a third of what it lacks.
_MIN_GAIN = 0.03
_OWN = "that of the weights"


def choose_image_size(
    config: Config, splits: DatasetSplits, *, side: int, minutes: float, num_affordable: int
) -> tuple[Size, int, str]:
    """Choose the size of images for a configuration with pretrained weights: their own or its
    double.

    Args:
        side: Median of the images' shorter sides, in pixels.
        num_affordable: Images whose features the minutes of the run allow at the weights' own size.

    Returns:
        The size, the factor by which it takes more time than the weights' own, and the reason for
        the user.
    """
    train = splits.split("train")
    model, pretrained = build_model(config, class_names=train.class_names)
    own = as_pair(config.data.image_size or model.patch_embed.img_size, name="data.image_size")
    doubled = (2 * own[0], 2 * own[1])
    if side < min(doubled):
        return own, 1, _OWN
    device = choose_device(config.train.device)
    num_images = _MAX_IMAGES
    is_affordable = True
    if device.type == "cpu":
        num_images = min(int(_IMAGES_A_MINUTE * minutes), num_images)
        num_validation = 0
        if config.data.validation_fraction > 0:
            num_validation = len(splits.split("validation"))
        is_affordable = (
            num_images >= _MIN_IMAGES
            and max(own) <= _MAX_SIDE
            and 2 * _COST * num_validation <= num_affordable
        )
    images = choose_images(train, num_images)
    # Several processes would have to compute the features together.
    is_measured = is_affordable and current_process().world_size == 1
    if not is_measured or assign_folds(images.labels, images.groups).max() < 1:
        return own, 1, f"{_OWN}; {doubled[0]} shows more, in {_COST} times the time"

    def measure(size: tuple[int, int]) -> float:
        sized = copy.deepcopy(model)
        sized.set_input_size(size)
        preprocess = choose_preprocess(config.with_data(image_size=size).data, train, pretrained)
        predictor = BatchPredictor(
            model=sized.to(device),
            preprocess=preprocess,
            num_classes=len(train.class_names),
            batch_size=choose_batch_size(device),
            device=device,
            precision=choose_precision(config.train.precision, device),
        )
        decoded = decode_dataset(images, preprocess, workers=config.data.workers)
        features = compute_features(predictor, decoded)
        return measure_precision(features, decoded.labels, decoded.groups)

    percent = partial(format_percent, count=len(images))
    here = measure(own)
    text = f"mean average precision of a probe of {len(images)} photos: {percent(here)}"
    if 1 - here < _MIN_GAIN:
        return own, 1, f"{_OWN}; {text}"
    there = measure(doubled)
    text += f" at {own[0]} px, {percent(there)} at {doubled[0]} px"
    if there - here < max(_MIN_GAIN, (1 - here) / 3):
        return own, 1, f"{_OWN}; {text}"
    return doubled, _COST, text


def describe_loss(side: int, image_size: int) -> str:
    """Describe what reducing images of a shorter side does to small things, as the end of a
    sentence; "" where the size is more than a half of it."""
    if side < 2 * image_size:
        return ""
    left = 8 * image_size / side
    return f"; photos of {side} px are reduced, and a detail of 8 px becomes {left:.1f} px"
