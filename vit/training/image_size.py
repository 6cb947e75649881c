"""The image size for pretrained weights: their own, or twice it where a linear probe is clearly
better, as for small things in large photos."""

import time
from pathlib import Path
from typing import Any

from vit.config import load_config
from vit.data.splits import DatasetSplits
from vit.model.model_info import find_image_size
from vit.runtime.numbers import format_percent
from vit.runtime.processes import current_process
from vit.training.cross_validation import FOLDS_KEYS
from vit.training.model import build_model
from vit.training.probe import PROBE_KEYS
from vit.training.run import build_run

# 100 photos in 5 minutes: 2 cores need 10 s at the first size and 50 s at the second, which isn't
# tried where the first takes over 15 s.
_IMAGES_A_MINUTE = 20
_SECONDS_A_MINUTE = 3
_MIN_IMAGES = 40
# Part of the errors that the larger size must avoid, 0.2 for ordinary photos; and 2.5 standard
# errors, times √n.
_MIN_GAIN = 1 / 3
_NOISE = 1.25


def choose_image_size(
    values: dict[str, Any], splits: DatasetSplits, *, side: int, minutes: float, device: str
) -> tuple[dict[str, Any], str]:
    """Choose the image size of a run from pretrained weights by the values of its configuration and
    the photos' shorter side, in pixels. Returns the values of a larger size, if any, and the
    reason for the user."""
    train = splits.split("train")
    size = values["data.image_size"]
    if size is None:
        config = load_config(None, values | PROBE_KEYS)
        model, preprocess = build_model(config, class_names=train.class_names)
        size = max(preprocess.image_size if preprocess else find_image_size(model) or ())
    reason = "that of the weights"
    if side < 2 * size:
        return {}, reason
    reason += f"; data.image_size={2 * size} shows more, in 5 times the time"
    count = min(round(_IMAGES_A_MINUTE * minutes), len(train))
    # Folds must not know what all images chose. Several processes would compute together.
    is_alone = values["data.validation_fraction"] > 0 and current_process().world_size == 1
    if count < _MIN_IMAGES or not is_alone:
        return {}, reason

    def measure(size: int) -> float:
        """Return a probe's accuracy in cross-validation; 1 for too few."""
        # Only these images are decoded.
        sized = {"data.image_size": size, "data.pipeline": "workers", "model.probe": count}
        config = load_config(None, values | FOLDS_KEYS | PROBE_KEYS | sized)
        run = build_run(config, directory=Path(), device_name=config.train.device, splits=splits)
        assert run.probe is not None
        return run.probe.probe.accuracy or 1.0

    started_at = time.perf_counter()
    own = measure(size)
    seconds = time.perf_counter() - started_at
    needed = own + max(_MIN_GAIN * (1 - own), _NOISE * count**-0.5)
    if seconds > _SECONDS_A_MINUTE * minutes or needed > 1:
        return {}, reason
    larger = measure(2 * size)
    reason = (
        f"a linear probe of {count} photos: {format_percent(own, count)} correct at {size} px,"
        f" {format_percent(larger, count)} at {2 * size} px"
    )
    if larger < needed:
        return {}, reason
    sized: dict[str, Any] = {"data.image_size": 2 * size}
    if device == "cpu":
        reason += ", where a probe takes all minutes"
        sized |= PROBE_KEYS | {"model.probe": 2 * count}
    return sized, reason
