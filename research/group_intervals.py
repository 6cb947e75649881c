"""How often a 95 % interval holds the true value where test images come in groups, and how often
`vit compare` calls two equal models different there.

    python research/group_intervals.py --output benchmarks/results

Accuracies: each group has an accuracy of its own (beta-binomial with the given correlation of the
images of a group). Other metrics: the logits of an image are a constant for its label and normal
noise, of which a share is common to its group; the images of a group have one label, or each its
own. Comparisons: the shares of images that both, one or none of two models predicts correctly vary
between groups (Dirichlet). `--before FILE` measures an earlier `vit/evaluation/intervals.py` too.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conditions import describe_conditions, write_result

from vit.evaluation.clusters import compute_clustered_interval
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import Scores, compute_metrics, score_logits
from vit.evaluation.significance import compare_models, correct_p_values

NAME = "group_intervals"
METRICS = ("top1", "loss", "brier", "macro_f1", "macro_precision", "macro_recall", "ece")
# sizes of the groups, accuracy, correlation within groups
ACCURACIES = (
    ("20 varying", 0.9, 0.6), ("20 varying", 0.7, 0.2), ("30 × 5", 0.95, 0.5),
    ("30 × 5", 0.95, 0.0), ("6 × 30", 0.8, 0.7), ("10 × 10", 0.9, 0.6), ("10 × 10", 0.9, 1.0),
    ("15, one large", 0.9, 0.9), ("100 × 5", 0.98, 0.5), ("50 × 4", 0.99, 0.8),
    ("20 × 1, 20 × 5", 0.9, 0.0), ("100 × 1", 0.9, 0.0), ("8 × 20", 0.9, 0.3),
    ("15 × 20", 0.95, 0.3), ("10 × 20", 0.9, 0.5), ("40 × 3", 0.9, 0.3), ("20 × 10", 0.5, 0.5),
)  # fmt: skip
# sizes, classes, share of the noise that is common to a group, whether a group has one label
SCORES = (
    ("20 × 5", 2, 0.7, True), ("20 varying", 3, 0.5, True), ("60 × 5", 10, 0.5, True),
    ("12 × 20", 4, 0.3, False), ("10 × 10", 2, 0.8, False), ("15, one large", 3, 0.6, False),
)  # fmt: skip
# sizes, correlation, share of images on which the models differ, difference
PAIRS = (
    ("20 varying", 0.5, 0.1, 0.0), ("30 × 5", 0.5, 0.06, 0.0), ("10 × 10", 0.6, 0.2, 0.0),
    ("6 × 30", 0.7, 0.2, 0.0), ("100 × 5", 0.3, 0.1, 0.0), ("200 × 1", 0.0, 0.2, 0.0),
    ("30 × 5", 0.5, 0.3, 0.1), ("100 × 5", 0.3, 0.2, 0.1),
)  # fmt: skip
# logit of the label, standard deviation of the noise
MARGIN, NOISE = 4.0, 2.0
TRUTH_GROUPS = 40_000

Interval = Callable[[Scores, Any], dict[str, tuple[float, float]]]


def draw_sizes(name: str, rng: np.random.Generator) -> np.ndarray:
    """Number of images of each group."""
    if name == "20 varying":
        return np.maximum(1, rng.poisson(rng.gamma(1.0, 10, 20)))
    if name == "15, one large":
        return np.array([75, *[5] * 14])
    parts = [part.split(" × ") for part in name.split(", ")]
    return np.concatenate([np.full(int(groups), int(size)) for groups, size in parts])


def draw_rates(mean: np.ndarray, correlation: float, count: int, rng: np.random.Generator) -> Any:
    """Shares of some outcomes in each group, [count, outcomes]."""
    if correlation == 0:
        return np.tile(mean, (count, 1))
    if correlation == 1:
        return rng.multinomial(1, mean, count).astype(float)
    return rng.dirichlet(np.maximum(mean, 1e-9) * (1 - correlation) / correlation, count)


def draw_outcomes(
    name: str, mean: np.ndarray, correlation: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Outcome and group of each image."""
    sizes = draw_sizes(name, rng)
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    rates = draw_rates(mean, correlation, len(sizes), rng)
    ends = rates.cumsum(axis=1)[clusters, :-1]
    return (rng.random(len(clusters))[:, None] > ends).sum(axis=1), clusters


def measure_accuracies(draws: int, interval: Any) -> list[dict[str, Any]]:
    """Coverage and mean width of the interval of an accuracy."""
    rows = []
    for name, accuracy, correlation in ACCURACIES:
        rng = np.random.default_rng(1)
        bounds = []
        for _ in range(draws):
            outcome, clusters = draw_outcomes(
                name, np.array([accuracy, 1 - accuracy]), correlation, rng
            )
            bounds.append(interval(outcome == 0, clusters))
        low, high = np.array(bounds).T
        rows.append(
            {
                "groups": name,
                "accuracy": accuracy,
                "correlation": correlation,
                "coverage": float(((low <= accuracy) & (accuracy <= high)).mean()),
                "width": float((high - low).mean()),
            }
        )
    return rows


def draw_scores(
    sizes: np.ndarray, classes: int, common: float, *, one_label: bool, rng: np.random.Generator
) -> tuple[Scores, list[str]]:
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    count = len(clusters)
    labels = rng.integers(classes, size=len(sizes))[clusters]
    if not one_label:
        labels = rng.integers(classes, size=count)
    noise = np.sqrt(common) * rng.standard_normal((len(sizes), classes))[clusters]
    noise += np.sqrt(1 - common) * rng.standard_normal((count, classes))
    logits = MARGIN * np.eye(classes)[labels] + NOISE * noise
    return score_logits(logits.astype(np.float32), labels), clusters.astype(str).tolist()


def measure_scores(draws: int, interval: Interval) -> list[dict[str, Any]]:
    """Coverage and mean width of the intervals of all metrics."""
    rows = []
    for name, classes, common, one_label in SCORES:
        rng = np.random.default_rng(2)
        many, _ = draw_scores(
            np.full(TRUTH_GROUPS, 5), classes, common, one_label=one_label, rng=rng
        )
        truth = compute_metrics(many)
        bounds = []
        for _ in range(draws):
            scores, groups = draw_scores(
                draw_sizes(name, rng), classes, common, one_label=one_label, rng=rng
            )
            intervals = interval(scores, groups)
            bounds.append([intervals[metric] for metric in METRICS])
        low, high = np.moveaxis(np.array(bounds), 2, 0)
        values = np.array([truth[metric] for metric in METRICS])
        coverage = ((low <= values) & (values <= high)).mean(axis=0)
        rows.append(
            {
                "groups": name,
                "classes": classes,
                "common": common,
                "one label": one_label,
                "coverage": dict(zip(METRICS, coverage.tolist(), strict=True)),
                "width": dict(zip(METRICS, (high - low).mean(axis=0).tolist(), strict=True)),
            }
        )
    return rows


def measure_pairs(draws: int, *, grouped: bool) -> list[dict[str, Any]]:
    """Significant differences, and coverage and width of the interval of the difference."""
    rows = []
    for name, correlation, changed, difference in PAIRS:
        rng = np.random.default_rng(3)
        only_b = (changed + difference) / 2
        mean = np.array([1 - changed, changed - only_b, only_b])
        outcomes = []
        for _ in range(draws):
            outcome, clusters = draw_outcomes(name, mean, correlation, rng)
            changes = np.array([0.0, -1.0, 1.0])[outcome]
            if not grouped:
                clusters = np.arange(len(clusters))
            p_value, interval, _ = compare_models(changes, clusters)
            outcomes.append((p_value, *interval))
        p_values, low, high = np.array(outcomes).T
        rows.append(
            {
                "groups": name,
                "correlation": correlation,
                "changed": changed,
                "difference": difference,
                "significant": float((p_values < 0.05).mean()),
                "coverage": float(((low <= difference) & (difference <= high)).mean()),
                "width": float((high - low).mean()),
            }
        )
    return rows


def measure_families(draws: int) -> list[dict[str, Any]]:
    """Comparisons of equal models with a first one of which any is significant, and the share of
    true differences of the size that is said to be found in 80 % that are found."""
    rows = []
    for models in (2, 3, 6, 11):
        rng = np.random.default_rng(4)
        errors, plain_errors, found = [], [], []
        for _ in range(draws):
            hits = rng.random((models, 500)) < rng.beta(4, 1, 500)
            changes = hits[1:].astype(float) - hits[0]
            alone = np.arange(500)
            results = [
                compare_models(change, alone, significance=0.05 / (models - 1))
                for change in changes
            ]
            p_values = [result[0] for result in results]
            plain_errors.append(min(p_values) < 0.05)
            errors.append(min(correct_p_values(p_values)) < 0.05)
            # the first pair again, now truly different by as much as it says
            changed = float((changes[0] != 0).mean())
            only_b = (changed + results[0][2]) / 2
            drawn = rng.multinomial(1, [1 - changed, max(changed - only_b, 0), only_b], 500)
            p_value, _, _ = compare_models(drawn @ np.array([0.0, -1.0, 1.0]), alone)
            found.append(p_value < 0.05 / (models - 1))
        rows.append(
            {
                "models": models,
                "without correction": float(np.mean(plain_errors)),
                "Holm": float(np.mean(errors)),
                "power": float(np.mean(found)),
            }
        )
    return rows


def load_before(path: Path) -> Any:
    """An earlier version of `vit/evaluation/intervals.py`."""
    spec = importlib.util.spec_from_file_location("before", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def format_table(result: dict[str, Any], part: str) -> str:
    """Coverage in per cent, and in brackets the mean width; before → now."""
    now = result[part]
    before = result.get(f"{part} before", [None] * len(now))
    keys = [key for key in now[0] if key not in ("coverage", "width")]
    measured = METRICS if part == "metrics" else ("coverage (width)",)
    lines = [f"| {' | '.join([*keys, *measured])} |", "|---" * (len(keys) + len(measured)) + "|"]
    for row, old in zip(now, before, strict=True):
        cells = [str(row[key]) for key in keys]
        for metric in measured:
            texts = []
            for each in (old, row):
                if each is None:
                    continue
                coverage, width = each["coverage"], each["width"]
                if part == "metrics":
                    coverage, width = coverage[metric], width[metric]
                texts.append(f"{100 * coverage:.1f} ({width:.3f})")
            cells.append(" → ".join(texts))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000, help="of each setting")
    parser.add_argument("--before", type=Path, help="an earlier intervals.py")
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {"machine": describe_conditions("cpu"), "draws": options.draws}
    if options.before is not None:
        before = load_before(options.before)
        result["accuracies before"] = measure_accuracies(
            options.draws, before.compute_clustered_interval
        )
        result["metrics before"] = measure_scores(options.draws, before.compute_intervals)
        result["pairs before"] = measure_pairs(options.draws, grouped=False)
    result["accuracies"] = measure_accuracies(options.draws, compute_clustered_interval)
    result["metrics"] = measure_scores(options.draws, compute_intervals)
    result["pairs"] = measure_pairs(options.draws, grouped=True)
    result["families"] = measure_families(options.draws)
    result["seconds"] = round(time.perf_counter() - start)
    for part in ("accuracies", "metrics", "pairs"):
        print(format_table(result, part))
    for row in result["families"]:
        print(row)
    if options.output:
        write_result(options.output, NAME, result)


if __name__ == "__main__":
    main()
