"""How a linear probe's accuracy grows with the number of its training images.

Errors of classifiers fall with the number of training images n approximately as a + b·n^−c, an
inverse power law (Figueroa et al. 2012, "Predicting sample size required for classification
performance"). Its continuation is a forecast for twice as many images.
"""

import warnings
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vit.training.folds import Folds

# fractions of the images of the other folds
_FRACTIONS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
# Features × classes × images of all regressions: about half a minute of one core.
_MAX_VALUES = 500_000_000
# With less the law is not determined.
_MIN_POINTS = 4
_MIN_IMAGES_A_CLASS = 5
_MIN_ERRORS = 5


def measure_learning_curve(
    features: Float[np.ndarray, "n D"],
    labels: Int[np.ndarray, " n"],
    folds: Folds,
    *,
    strength: float,
    balanced: bool,
) -> dict[str, Any] | None:
    """Fit a probe again on parts of its images, and measure it on images that were left out.

    Returns the content of `learning_curve.json`: numbers of images with accuracies from 0 to 1, the
    forecast for twice as many with its 95 % interval, and a sentence. None if there are too few
    images for a forecast, or so many that it would take too long.
    """
    # These take a second to import.
    from scipy.optimize import curve_fit
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import PredefinedSplit, learning_curve
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    count = len(labels)
    num_classes = len(np.unique(labels))
    num_folds = int(folds.max()) + 1
    num_values = features.size * num_classes * sum(_FRACTIONS) * (num_folds - 1)
    if num_folds < 2 or num_values > _MAX_VALUES:
        return None
    class_weight = "balanced" if balanced else None
    probe = LogisticRegression(C=strength, max_iter=500, class_weight=class_weight)
    # A part may lack a class, of which scikit-learn warns. One thread, because in many small
    # regressions several would wait for one another.
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        sizes, _, scores = learning_curve(
            make_pipeline(StandardScaler(), probe),
            features,
            labels,
            cv=PredefinedSplit(folds),
            train_sizes=_FRACTIONS,
            shuffle=True,
            random_state=0,
        )
    # A part of a single class has no score.
    is_usable = (sizes >= _MIN_IMAGES_A_CLASS * num_classes) & ~np.isnan(scores).any(axis=1)
    sizes, scores = sizes[is_usable], scores[is_usable]
    if len(sizes) < _MIN_POINTS or round((1 - scores[-1].mean()) * count) < _MIN_ERRORS:
        return None

    def law(size: Any, a: float, b: float, c: float) -> Any:
        return a + b * (size / sizes[-1]) ** -c

    # With c = 0 the law has no limit; 1 is the rate of a model with a fixed number of weights.
    bounds = ([0, 0, 0.1], [1, 1, 1])
    # accuracy of each fold's law, now and with twice as many images
    reached = []
    for errors in (1 - scores).T:
        start = (errors.min() / 2, min(errors.min() / 2 + 0.01, 1), 0.5)
        try:
            fitted, _ = curve_fit(law, sizes, errors, p0=start, bounds=bounds, max_nfev=10_000)
        except RuntimeError:  # it doesn't converge
            return None
        reached.append([1 - law(count, *fitted), 1 - law(2 * count, *fitted)])
    now, twice = np.array(reached).clip(0, 1).mean(axis=0).tolist()
    # The folds share most of their training images, so that the binomial variance of the images
    # that were left out is added to that between the folds.
    best = scores[-1].mean()
    variance = np.var(reached, axis=0, ddof=1)[1] / num_folds + best * (1 - best) / count
    low, high = (float(np.clip(twice + z * variance**0.5, 0, 1)) for z in (-1.96, 1.96))
    return {
        "num_images": sizes.tolist(),
        "top1": scores.mean(axis=1).tolist(),
        "forecast": {"num_images": 2 * count, "top1": twice, "interval": [low, high]},
        "top1_now": now,
        "sentence": (
            f"With twice as many photos ({2 * count:,}) about {100 * twice:.3g} % ({100 * low:.3g}–"
            f"{100 * high:.3g} %) instead of {100 * now:.3g} % are expected to be classified"
            " correctly"
        ),
    }
