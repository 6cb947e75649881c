"""The image size for pretrained weights: their own, or twice it where a linear probe is clearly
better there, as for small things in large photos."""

import time
from pathlib import Path
from typing import Any

from vit.config import Config
from vit.data.splits import DatasetSplits
from vit.runtime.numbers import format_percent
from vit.runtime.processes import current_process
from vit.training.model import build_model
from vit.training.run import build_run

# Four times the patches, and the attention between them: 190 s instead of 38 s for 200 photos.
_COST = 5
# In 5 minutes 100 photos: at both sizes they take 2 cores one of these. More than a quarter isn't
# spent on the larger size; the run's own probe then takes three times as many photos.
_IMAGES_A_MINUTE = 20
_MAX_SHARE = 1 / 4
_MIN_IMAGES = 40
# Accuracy that the larger size must gain, less two standard errors. Photos of Imagenette gained
# 0.02 to 0.07 from 112 to 224 px.
_MIN_GAIN = 0.1


def choose_image_size(
    config: Config, splits: DatasetSplits, *, side: int, minutes: float
) -> tuple[dict[str, Any], str]:
    """Choose the image size of a run from pretrained weights, on photos whose median shorter side
    is `side` pixels. Returns the keys of the configuration for a larger one than that of the
    weights, and the reason for the user."""
    train = splits.split("train")
    size = config.data.image_size
    if size is None:
        size = max(build_model(config, class_names=train.class_names)[0].patch_embed.img_size)
    reason = "that of the weights"
    if not isinstance(size, int) or side < 2 * size:
        return {}, reason
    reason += f"; data.image_size={2 * size} shows more, in {_COST} times the time"
    count = min(round(_IMAGES_A_MINUTE * minutes), len(train))
    # Without validation images, an estimate by folds must not know what all images chose. Several
    # processes would have to compute the features together.
    is_alone = config.data.validation_fraction > 0 and current_process().world_size == 1
    if count < _MIN_IMAGES or not is_alone:
        return {}, reason
    started_at = time.perf_counter()
    own = _measure_probe(config, splits, count)
    is_slow = _COST * (time.perf_counter() - started_at) > _MAX_SHARE * 60 * minutes
    if is_slow or own > 1 - _MIN_GAIN:
        return {}, reason
    larger = _measure_probe(config.with_data(image_size=2 * size), splits, count)
    reason = (
        f"a linear probe of {count} photos classifies {format_percent(own, count)} correctly at"
        f" {size} px, {format_percent(larger, count)} at {2 * size} px"
    )
    variance = own * (1 - own) + larger * (1 - larger)
    if larger - own - 2 * (variance / count) ** 0.5 < _MIN_GAIN:
        return {}, reason
    return {"data.image_size": 2 * size, "model.probe": 3 * count}, reason


def _measure_probe(config: Config, splits: DatasetSplits, count: int) -> float:
    """Return the accuracy of a probe of images in cross-validation; 1 if they are too few."""
    # Only the images of the probe are decoded.
    config = config.with_data(pipeline="workers", validation_fraction=0)
    model = config.model.model_copy(update={"probe": count, "freeze": "backbone"})
    config = config.model_copy(update={"model": model})
    run = build_run(config, directory=Path(), device_name=config.train.device, splits=splits)
    assert run.probe is not None
    return run.probe.probe.accuracy or 1.0
