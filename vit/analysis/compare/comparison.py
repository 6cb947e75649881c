"""Compare two evaluations of the same images, and test whether they differ by more than chance."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.stats import binomtest

from vit.evaluation.predictions import Predictions, load_predictions
from vit.prediction.probabilities import Ints
from vit.runtime.arguments import check_kind
from vit.runtime.documents import read_json
from vit.runtime.files import FileContent, Result, expand_home, format_json

# Differences with a smaller p-value are called significant.
SIGNIFICANCE = 0.05
Interval = tuple[float, float]
_NUM_DRAWS = 20_000


@dataclass(frozen=True)
class Comparison(Result):
    """Evaluation B compared with A, image by image.

    Attributes:
        a: Directory of evaluation A.
        b: Directory of evaluation B.
        num_images: Number of images.
        accuracies: Accuracy of A and that of B; all labels of an image have to be right.
        difference: Accuracy of B minus that of A.
        interval: Its 95 % interval, which holds 0 if the difference is not significant.
        p_value: Two-sided p-value of McNemar's exact test.
        is_significant: True if the p-value is below 0.05.
        only_a: Images that only A predicts correctly.
        only_b: Images that only B predicts correctly.
    """

    a: str
    b: str
    num_images: int
    accuracies: tuple[float, float]
    difference: float
    interval: Interval
    p_value: float
    is_significant: bool
    # notebooks show a result that ends a cell
    only_a: list[str] = field(repr=False)
    only_b: list[str] = field(repr=False)

    @property
    def sources(self) -> tuple[str, str]:
        return self.a, self.b

    def build_files(self) -> dict[str, FileContent]:
        return {"comparison.json": format_json({"schema_version": 3, **vars(self)})}


def compare(a: str | Path, b: str | Path) -> Comparison:
    """Compare two evaluations of the same images.

    Args:
        a: Directory of `vit evaluate`, or that `.save()` of a result of
            `vit.evaluate` wrote.
        b: Directory of the evaluation that is compared with it.

    Returns:
        The comparison: the difference in accuracy with its 95 % interval by a
        bootstrap over images, or over their groups, the p-value of McNemar's
        exact test, and the images that only one of the two predicts correctly.
        Where an image may have several labels, all of them have to be right.

    Raises:
        ValueError: The evaluations are of different images or labels.

    Example:
        >>> comparison = vit.compare("runs/small-eval", "runs/large-eval")
        >>> comparison.difference, comparison.interval
    """
    expected = "a directory; a result of vit.evaluate is written by .save(directory)"
    for name, item in (("a", a), ("b", b)):
        check_kind(item, (str, Path), name=name, expected=expected)
    a, b = expand_home(a), expand_home(b)
    (fingerprint_a, found_a), (fingerprint_b, found_b) = map(_load, (a, b))
    # the fingerprint is of pixels and labels, not of names
    if fingerprint_a != fingerprint_b or found_a.ids.tolist() != found_b.ids.tolist():
        raise ValueError(
            f"{a} and {b} were evaluated on different images or labels; evaluate both on the same"
            " copy of the images, with labels in the same order"
        )
    # 1 where only B is correct, -1 where only A is
    changes = found_b.correct.astype(int) - found_a.correct
    clusters = np.unique(found_a.groups, return_inverse=True)[1]
    p_value, interval = compute_paired_test(changes, clusters)
    return Comparison(
        a=str(a),
        b=str(b),
        num_images=len(changes),
        accuracies=(float(found_a.correct.mean()), float(found_b.correct.mean())),
        difference=float(changes.mean()),
        interval=interval,
        p_value=p_value,
        is_significant=p_value < SIGNIFICANCE,
        only_a=found_a.ids[changes < 0].tolist(),
        only_b=found_a.ids[changes > 0].tolist(),
    )


def compute_paired_test(changes: Ints, clusters: Ints) -> tuple[float, Interval]:
    """Test whether two models are equally accurate on the same images, by 1 where only B is
    correct, -1 where only A is, else 0, [n], and the number of each image's group, [n].

    The p-value is McNemar's (1947, exact): the sign test on the images that only one model predicts
    correctly, or, if images come in groups, on the groups in which one model is correct more often.
    The 95 % interval of the accuracy of B minus that of A is a bootstrap's over the groups, and
    holds 0 if the p-value is not significant. Before drawing, a group of average size is added for
    each model in which only that one is correct, as in Bonett & Price (2012, "Adjusted Wald
    confidence interval for a difference of binomial proportions based on paired data"): without
    them, the interval of models that never disagree would have no width.
    """
    # images of each group, and how many more of them only B has right
    sizes = np.bincount(clusters)
    sums = np.bincount(clusters, changes)
    num_a, num_b = int(np.sum(sums < 0)), int(np.sum(sums > 0))
    p_value = float(binomtest(num_b, num_a + num_b).pvalue) if num_a + num_b else 1.0

    # a group for each model in which only that one is right
    size = sizes.mean()
    groups = np.stack([[*sums, -size, size], [*sizes, size, size]], axis=1)
    # groups that are alike are drawn together: [kinds, 2] and how many there are of each
    kinds, counts = np.unique(groups, axis=0, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(
        counts.sum(), counts / counts.sum(), size=_NUM_DRAWS
    )
    totals = drawn @ kinds  # [draws, 2]
    low, high = np.quantile(totals[:, 0] / totals[:, 1], (0.025, 0.975)).tolist()
    # the added groups draw the interval towards 0
    held = [float(changes.mean()), *([0.0] if p_value >= SIGNIFICANCE else [])]
    return p_value, (min(low, *held), max(high, *held))


def _load(directory: Path) -> tuple[str, Predictions]:
    """Read an evaluation's fingerprint, and its predictions sorted by the names of the images."""
    path = directory / "evaluation.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no evaluation.json; run vit evaluate first")
    facts = read_json(path)
    try:
        fingerprint, num_images = facts["fingerprint"], facts["num_images"]
        found = load_predictions(directory, len(facts["per_class"]))
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path} is of another version, or damaged; evaluate again") from error
    # both files are of one evaluation only if nobody replaced one of them
    if found is None or len(found.ids) != num_images:
        raise ValueError(
            f"{directory} has no predictions.npz of {num_images} images, because an earlier version"
            " wrote it or files were replaced; evaluate again"
        )
    order = found.ids.argsort()
    return fingerprint, Predictions(**{name: each[order] for name, each in vars(found).items()})
