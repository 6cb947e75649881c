"""How large the classes of the training images are, and what is done where they differ."""

from typing import Literal

import numpy as np

ClassBalance = Literal["none", "weights", "sampler"]
# of the largest class to the smallest, up to which "auto" leaves them as they are. At 20:1 macro F1 on balanced test
# images of CIFAR-10 was 51.7 % so, 63.9 % with weights, 62.2 % with the sampler (one seed, benchmarks/class_balance.py)
MOST_RATIO = 5


def compute_class_ratio(labels: np.ndarray) -> float:
    """Images of the largest class for each of the smallest, of those that have any."""
    counts = np.unique(labels, return_counts=True)[1]
    return float(counts.max() / counts.min())


def choose_class_balance(labels: np.ndarray, *, wanted: ClassBalance | Literal["auto"]) -> tuple[ClassBalance, str]:
    """What is done about classes of different sizes, and why in words."""
    sizes = f"{compute_class_ratio(labels):.1f} images of the largest class for one of the smallest"
    if wanted != "auto":
        return wanted, f"train.class_balance says so; {sizes}"
    return ("weights" if compute_class_ratio(labels) > MOST_RATIO else "none"), sizes


def compute_class_weights(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """float32 [C]: inversely proportional to the images of a class, as scikit-learn's "balanced", so that their mean
    over the images is 1; 0 for a class without any."""
    counts = np.bincount(labels, minlength=num_classes)
    weights: np.ndarray = len(labels) / np.maximum(counts, 1) / (counts > 0).sum() * (counts > 0)
    return weights.astype(np.float32)
