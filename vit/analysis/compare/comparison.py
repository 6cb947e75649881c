"""Compare evaluations of the same images, and test whether they differ by more than chance."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from vit.evaluation.predictions import load_predictions
from vit.prediction.probabilities import Bools, Ints
from vit.runtime.arguments import check_kind, shorten
from vit.runtime.documents import read_json
from vit.runtime.files import FileContent, Result, format_json

# Differences with a smaller p-value are called significant.
SIGNIFICANCE = 0.05
Interval = tuple[float, float]
_NUM_DRAWS = 20_000


@dataclass(frozen=True, eq=False)
class ComparedEvaluation:
    """An evaluation as its directory has it.

    Attributes:
        name: The part of its path that differs from the others.
        data: Data set and split, for readers.
        fingerprint: Hash of the images and labels.
        ids: Name of each image.
        groups: Group of each image, [n]: its name if it is its own group.
        correct: True for an image that is predicted correctly, or of which all labels are right.
        is_multilabel: True if an image may have several labels.
    """

    name: str
    data: str
    fingerprint: str
    ids: list[str]
    groups: NDArray[Any]
    correct: Bools
    is_multilabel: bool

    @property
    def accuracy(self) -> float:
        """Share of the images that are predicted correctly, 0 to 1."""
        return float(self.correct.mean())


@dataclass(frozen=True)
class Pair:
    """B compared with A, image by image.

    Attributes:
        difference: Accuracy of B minus that of A; all labels of an image have to be right.
        interval: Its 95 % interval, which holds 0 if the difference is not significant.
        p_value: Two-sided p-value of McNemar's exact test.
        is_significant: True if the p-value is below 0.05.
        only_a: Images that only A predicts correctly.
        only_b: Images that only B predicts correctly.
    """

    a: str
    b: str
    difference: float
    interval: Interval
    p_value: float
    is_significant: bool
    only_a: list[str]
    only_b: list[str]


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Every evaluation compared with the first one."""

    evaluations: list[ComparedEvaluation]
    pairs: list[Pair]

    def __repr__(self) -> str:
        """One line, because notebooks show a result that ends a cell."""
        pairs = [
            f"{pair.b} - {pair.a}: {pair.difference:+.4f} (p = {pair.p_value:.3g})"
            for pair in self.pairs
        ]
        return f"Comparison({shorten('; '.join(pairs))})"

    def build_files(self) -> dict[str, FileContent]:
        content = {
            "schema_version": 2,
            "fingerprint": self.evaluations[0].fingerprint,
            "evaluations": [
                {"name": each.name, "accuracy": each.accuracy} for each in self.evaluations
            ],
            "pairs": [asdict(pair) for pair in self.pairs],
        }
        return {"comparison.json": format_json(content)}


def compare(evaluations: Sequence[str | Path]) -> Comparison:
    """Compare evaluations of the same images with the first of them.

    Args:
        evaluations: Two or more directories of `vit evaluate`, or that
            `.save()` of a result of `vit.evaluate` wrote.

    Returns:
        The comparison: `.pairs` hold the difference in accuracy with its 95 %
        interval by a bootstrap over images, or over their groups, the p-value
        of McNemar's exact test, and the images that only one of the two
        predicts correctly. Where an image may have several labels, all of them
        have to be right. The p-values are those of single pairs.

    Raises:
        ValueError: There are fewer than two evaluations, or they are of
            different images or labels.

    Example:
        >>> comparison = vit.compare(["runs/small-eval", "runs/large-eval"])
        >>> comparison.pairs[0].difference, comparison.pairs[0].interval
    """
    expected = "a list of directories; a result of vit.evaluate is written by .save(directory)"
    check_kind(evaluations, (list, tuple), name="evaluations", expected=expected)
    for item in evaluations:
        check_kind(item, (str, Path), name="an evaluation", expected=expected)
    if len(evaluations) < 2:
        raise ValueError("vit compare needs two or more evaluations")
    folders = [Path(item).resolve() for item in evaluations]
    common = os.path.commonpath([folder.parent for folder in folders])
    first, *others = (
        _load(Path(item), os.path.relpath(folder, common))
        for item, folder in zip(evaluations, folders, strict=True)
    )
    pairs = [_compare_pair(first, other) for other in others]
    return Comparison([first, *others], pairs)


def compute_paired_test(changes: Ints, clusters: Ints) -> tuple[float, Interval]:
    """Test whether two models are equally accurate on the same images.

    The p-value is McNemar's (1947, exact): the sign test on the images that only one model predicts
    correctly, or, if images come in groups, on the groups in which one model is correct more often.
    The interval is a bootstrap's over the groups. Before drawing, a group of average size is added
    for each model in which only that one is correct, as in Bonett & Price (2012, "Adjusted Wald
    confidence interval for a difference of binomial proportions based on paired data"): without
    them, the interval of models that never disagree would have no width.

    Args:
        changes: 1 where only B is correct, -1 where only A is, else 0, [n].
        clusters: Number of each image's group, [n].

    Returns:
        The p-value; and the 95 % interval of the accuracy of B minus that of A, which holds 0 if
        the p-value is not significant.
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


def _compare_pair(a: ComparedEvaluation, b: ComparedEvaluation) -> Pair:
    _check_same_images(a, b)
    # 1 where only B is correct, -1 where only A is, else 0
    changes = b.correct.astype(int) - a.correct
    clusters = np.unique(a.groups, return_inverse=True)[1]
    p_value, interval = compute_paired_test(changes, clusters)
    ids = np.array(a.ids, dtype=object)
    return Pair(
        a=a.name,
        b=b.name,
        difference=float(changes.mean()),
        interval=interval,
        p_value=p_value,
        is_significant=p_value < SIGNIFICANCE,
        only_a=ids[changes < 0].tolist(),
        only_b=ids[changes > 0].tolist(),
    )


def _load(directory: Path, name: str) -> ComparedEvaluation:
    """Read an evaluation's directory; its images are sorted by name.

    Raises:
        FileNotFoundError: There is none.
        ValueError: Its files are of another kind or version, or don't belong together.
    """
    path = directory / "evaluation.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} has no evaluation.json; run vit evaluate first")
    facts = read_json(path)
    try:
        num_classes = len(facts["per_class"])
        data = f"{facts['data']} ({facts['split']})"
        fingerprint, num_images = str(facts["fingerprint"]), facts["num_images"]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{path} is of another version, or damaged; evaluate again") from error
    found = load_predictions(directory, num_classes)
    # both files are of one evaluation only if nobody replaced one of them
    if found is None or len(found.ids) != num_images:
        raise ValueError(
            f"{directory} has no predictions.npz of {num_images} images, because an earlier version"
            " wrote it or files were replaced; evaluate again"
        )
    order = found.ids.argsort()
    return ComparedEvaluation(
        name=name,
        data=data,
        fingerprint=fingerprint,
        ids=found.ids[order].tolist(),
        groups=found.groups[order],
        correct=found.correct[order],
        is_multilabel=found.labels.ndim == 2,
    )


def _check_same_images(a: ComparedEvaluation, b: ComparedEvaluation) -> None:
    """Raise ValueError if two evaluations are of other images or labels."""
    if a.fingerprint != b.fingerprint or a.is_multilabel != b.is_multilabel:
        raise ValueError(
            f"{a.name} and {b.name} were evaluated on different images or labels"
            f" ({a.data} {a.fingerprint[:12]}, {b.data} {b.fingerprint[:12]});"
            " evaluate both on the same images, with labels in the same order"
        )
    if a.ids != b.ids:
        raise ValueError(
            f"the same images have different names in {a.name} and {b.name}; evaluate both on the"
            " same copy of the images"
        )
