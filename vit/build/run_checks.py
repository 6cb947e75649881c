"""What may go wrong with a run, said before it starts."""

from collections.abc import Iterator

import numpy as np

from vit.build.data import Data
from vit.build.run import Run
from vit.data.balance import MOST_RATIO, compute_class_ratio
from vit.data.open import ImageDataset
from vit.data.statistics import sample_statistics

_FEW_STEPS = 200
_SMALLER, _LARGER = 0.5, 8  # the images' shorter side, in units of data.image_size
_SAMPLE = 200  # images of a split


def list_warnings(run: Run) -> list[str]:
    """One sentence for each."""
    plan, data = run.trainer.plan, run.data
    warnings = list(data.train.notes)
    if plan.total_steps < _FEW_STEPS:
        cure = "raise train.epochs or lower train.batch_size"
        warnings.append(f"the run has {plan.total_steps} steps, and fewer than {_FEW_STEPS} rarely train well: {cure}")
    if compute_class_ratio(data.train.labels) > MOST_RATIO and data.class_balance == "none":
        counts, names = np.bincount(data.train.labels), data.train.class_names
        most, fewest = (f"{names[index]} has {counts[index]:,}" for index in (counts.argmax(), counts.argmin()))
        cure = "train.class_balance=auto balances them"
        warnings.append(f"classes of more than {MOST_RATIO}:1: {most} training images and {fewest}; {cure}")
    return warnings + list(_check_images(data))


def _check_images(data: Data) -> Iterator[str]:
    dataset: ImageDataset = data.dataset
    train, side = sample_statistics(dataset.split("train"), count=_SAMPLE), min(data.preprocess.image_size)
    if not _SMALLER * side <= train.median_side <= _LARGER * side:
        kind, cure = ("larger", "a larger one shows more of them")
        if train.median_side < side:
            kind, cure = ("smaller", "a smaller one trains faster")
        yield f"the images are much {kind} ({train.median_side:.0f} px) than data.image_size {side}; {cure}"
    for split in ("validation", "test"):
        if split in dataset.found:  # others are drawn from the training images
            found = train.compare(sample_statistics(dataset.split(split), count=_SAMPLE))
            values = ", ".join(f"{name} {ours:.3g} and {theirs:.3g}" for name, (ours, theirs) in found.items())
            if values:
                what = f"the training and {split} images were made in other ways: {values}"
                yield f"{what}; a model trained on the first may do worse on the others"
