"""How often a 95 % interval of `vit evaluate` holds the true value, and how often `vit compare`
calls no difference significant.

    python research/intervals.py --output benchmarks/results     # 6 minutes on one core

Test sets of 20 to 10,000 images of ten classes are drawn for models of known accuracy. A label is
drawn from the model's own probabilities; half of the draws measure these, half the probabilities of
logits twice as large, which are overconfident. Top-1 needs no draws: its coverage is a sum over the
binomial distribution.

Compared are recipes of equal accuracy that differ in which images they find hard. A model is right
where the sum of five normal effects is positive: of the image, of the recipe on this image, of the
training seed, of the seed on this image, and a constant that sets the accuracy. Single models are
compared without the effect of the seed, which would make one of them truly better.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from conditions import describe_conditions, write_result
from scipy.optimize import brentq
from scipy.special import softmax
from scipy.stats import binom, norm

from vit.evaluation.clusters import compute_proportion_interval
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import (
    Scores,
    compute_metrics,
    score_logits,
)
from vit.evaluation.significance import SIGNIFICANCE, compare_seeds, compute_mcnemar

NAME = "intervals"
NUM_CLASSES = 10
COUNTS = (20, 100, 1_000, 10_000)
ACCURACIES = (0.5, 0.8, 0.9, 0.98, 0.99, 0.999)
SIMULATED = ("loss", "brier", "macro_f1", "macro_recall", "ece")
# images that a true value is computed from
TRUTH_IMAGES = 300_000

# seeds of the two recipes that are compared
SEEDS = ((1, 1), (2, 2), (3, 3), (5, 5), (1, 5))
# standard deviations: of images; of a recipe, a seed on an image; of a seed. At an accuracy of 0.9
# seeds differ by 0.4 %, as those of configs/ do
IMAGE_EFFECT = 1.5
RECIPE_EFFECT = 0.5
NOISE = 0.8
SEED_EFFECT = 0.04


def find_sharpness(accuracy: float) -> float:
    """The standard deviation of the logits of a calibrated model of this accuracy."""
    noise = np.random.default_rng(0).standard_normal((20_000, NUM_CLASSES))

    def difference(log_sharpness: float) -> float:
        return float(softmax(np.exp(log_sharpness) * noise, axis=1).max(axis=1).mean()) - accuracy

    return float(np.exp(brentq(difference, -3, 12)))


def draw_scores(
    count: int, *, sharpness: float, factor: float, generator: np.random.Generator
) -> Scores:
    """Scores of a model that multiplies calibrated logits by `factor`."""
    logits = sharpness * generator.standard_normal((count, NUM_CLASSES))
    labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    return score_logits((factor * logits).astype(np.float32), labels)


def compute_exact_coverage(count: int, accuracy: float) -> float:
    """Of the interval of top-1."""
    correct = np.arange(count + 1)
    low, high = np.array([compute_proportion_interval(hits, count) for hits in correct]).T
    holds = (low <= accuracy) & (accuracy <= high)
    return float(binom.pmf(correct, count, accuracy)[holds].sum())


def measure_coverage(accuracy: float, draws: int) -> dict[int, dict[str, float]]:
    """Fraction of test sets whose interval holds the true value, by images and metric."""
    sharpness = find_sharpness(accuracy)
    held: dict[int, dict[str, list[bool]]] = {count: defaultdict(list) for count in COUNTS}
    for factor in (1.0, 2.0):
        generator = np.random.default_rng(1)
        truth = compute_metrics(
            draw_scores(TRUTH_IMAGES, sharpness=sharpness, factor=factor, generator=generator)
        )
        for count in COUNTS:
            # the largest take most of the time
            for _ in range((draws if count < COUNTS[-1] else draws // 2) // 2):
                scores = draw_scores(count, sharpness=sharpness, factor=factor, generator=generator)
                intervals = compute_intervals(scores)
                for name in SIMULATED:
                    low, high = intervals[name]
                    held[count][name].append(low <= truth[name] <= high)
    return {
        count: {
            "top1": compute_exact_coverage(count, accuracy),
            **{name: float(np.mean(values)) for name, values in by_metric.items()},
        }
        for count, by_metric in held.items()
    }


def draw_correct(
    difficulty: np.ndarray, *, num_seeds: int, accuracy: float, generator: np.random.Generator
) -> np.ndarray:
    """Whether each seed of a recipe is right on each image, [seeds, n]."""
    count = len(difficulty)
    variance = IMAGE_EFFECT**2 + RECIPE_EFFECT**2 + NOISE**2 + SEED_EFFECT**2
    constant = norm.ppf(accuracy) * np.sqrt(variance)
    noise = generator.standard_normal((num_seeds, count), dtype=np.float32)
    logits = constant + IMAGE_EFFECT * difficulty + NOISE * noise
    logits += RECIPE_EFFECT * generator.standard_normal(count, dtype=np.float32)
    if num_seeds > 1:
        logits += SEED_EFFECT * generator.standard_normal((num_seeds, 1), dtype=np.float32)
    return np.asarray(logits > 0, dtype=float)


def measure_false_positives(accuracy: float, draws: int) -> dict[int, dict[str, float]]:
    """Fraction of comparisons of equally good recipes that are significant, by images and seeds."""
    generator = np.random.default_rng(2)
    rates: dict[int, dict[str, float]] = {}
    for count in COUNTS:
        num_significant: dict[str, int] = defaultdict(int)
        for _ in range(draws):
            difficulty = generator.standard_normal(count, dtype=np.float32)
            for seeds in SEEDS:
                a, b = (
                    draw_correct(
                        difficulty, num_seeds=num_seeds, accuracy=accuracy, generator=generator
                    )
                    for num_seeds in seeds
                )
                if seeds == (1, 1):
                    p_value = compute_mcnemar(int((a > b).sum()), int((b > a).sum()))
                else:
                    p_value, _, _ = compare_seeds(a, b)
                num_significant[name_seeds(seeds)] += p_value < SIGNIFICANCE
        rates[count] = {name: number / draws for name, number in num_significant.items()}
    return rates


def name_seeds(seeds: tuple[int, int]) -> str:
    return f"{seeds[0]} and {seeds[1]}"


def build_false_positive_table(result: dict[str, Any]) -> str:
    """Comparisons without a true difference that are significant, in per cent."""
    names = [name_seeds(seeds) for seeds in SEEDS]
    lines = [
        f"| accuracy | images | seeds: {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for accuracy, by_count in result["false_positives"].items():
        for count, by_seeds in by_count.items():
            cells = " | ".join(f"{100 * by_seeds[name]:.1f}" for name in names)
            lines.append(f"| {accuracy} | {int(count):,} | {cells} |")
    return "\n".join(lines)


def build_table(result: dict[str, Any]) -> str:
    """Coverage in per cent."""
    lines = [
        f"| accuracy | images | top-1 | {' | '.join(SIMULATED)} |",
        f"|---|---|---|{'---|' * len(SIMULATED)}",
    ]
    for accuracy, by_count in result["coverage"].items():
        for count, by_metric in by_count.items():
            cells = " | ".join(f"{100 * by_metric[name]:.1f}" for name in ("top1", *SIMULATED))
            lines.append(f"| {accuracy} | {int(count):,} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=500, help="test sets of each kind")
    parser.add_argument("--comparisons", type=int, default=4000, help="of each kind")
    parser.add_argument("--output", type=Path, help="folder for intervals-<machine>.json")
    options = parser.parse_args()
    start = time.perf_counter()
    machine = describe_conditions("cpu")
    coverage = {str(accuracy): measure_coverage(accuracy, options.draws) for accuracy in ACCURACIES}
    false_positives = {
        str(accuracy): measure_false_positives(accuracy, options.comparisons)
        for accuracy in ACCURACIES
    }
    result = {
        "machine": machine,
        "draws": options.draws,
        "comparisons": options.comparisons,
        "coverage": coverage,
        "false_positives": false_positives,
        "seconds": round(time.perf_counter() - start),
    }
    print(build_table(result))
    print(build_false_positive_table(result))
    if options.output:
        write_result(options.output, NAME, result)


if __name__ == "__main__":
    main()
