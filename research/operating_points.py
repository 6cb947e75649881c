"""How often intervals of one class against the rest cover where images come from patients, and how
well thresholds that are chosen on held-out images keep their promise.

    python research/operating_points.py --output benchmarks/results     # two minutes on one core

One patient in 13 has the finding, in all of their 1 to 7 images. The score of an image is 2.5 with
the finding, plus normal noise of the patient and of the image, both of variance 1. True values are
those of 100,000 patients. Each draw is a test set of so many patients. The values are computed by
`vit`, once beside scikit-learn. Images with four labels, of which one may have none, serve for the
fraction of labels that sets miss.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from conditions import describe_conditions, write_result
from scipy.special import expit
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from vit.evaluation.label_metrics import LabelScores, compute_per_label
from vit.evaluation.operating_point import choose_threshold, parse_rule
from vit.prediction.conformal import LEVELS, find_label_threshold

NAME = "operating_points"
NAMES = ("finding",)
PATIENTS = (150, 300, 600, 1500)
TRUTH_PATIENTS = 100_000
# noise of the patient, and the shift that the finding makes
SHIFT, OFFSET = 2.5, 2.5
RULES = ("sensitivity=0.9", "sensitivity=0.8", "specificity=0.95", "precision=0.5")


def draw(rng: np.random.Generator, patients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probability, finding and patient of each image."""
    clusters = np.repeat(np.arange(patients), rng.integers(1, 8, patients))
    has_finding = (rng.random(patients) < 1 / 13)[clusters]
    effect = rng.standard_normal(patients)[clusters]
    scores = SHIFT * has_finding + effect + rng.standard_normal(len(clusters))
    return expit(scores - OFFSET), has_finding, clusters


def measure(
    probabilities: np.ndarray, has_finding: np.ndarray, clusters: np.ndarray
) -> dict[str, tuple[float, float, float]]:
    """Value and interval of each metric."""
    scores = LabelScores(has_finding[:, None], probabilities[:, None], np.zeros(len(has_finding)))
    (row,) = compute_per_label(scores, NAMES, clusters.astype(str).tolist())
    assert row.roc_auc is not None
    assert row.average_precision is not None
    values = {
        "ROC AUC": (row.roc_auc, *row.roc_auc_interval),
        "average precision": (row.average_precision, *row.average_precision_interval),
    }
    for rates in row.thresholds:
        for name, value, interval in (
            ("sensitivity", rates.sensitivity, rates.sensitivity_interval),
            ("specificity", rates.specificity, rates.specificity_interval),
        ):
            if interval is not None:
                values[f"{name} at {rates.rule or 'probability=0.5'}"] = (value, *interval)
    return values


def measure_peer(probabilities: np.ndarray, has_finding: np.ndarray) -> dict[str, float]:
    """The same values by scikit-learn."""
    rates, sensitivity, _ = roc_curve(has_finding, probabilities, drop_intermediate=False)
    values = {
        "ROC AUC": float(roc_auc_score(has_finding, probabilities)),
        "average precision": float(average_precision_score(has_finding, probabilities)),
    }
    for level in LEVELS:
        allowed = rates <= 1 - level + 1e-12
        values[f"sensitivity at specificity={level}"] = float(sensitivity[allowed].max())
        reached = sensitivity >= level - 1e-12
        values[f"specificity at sensitivity={level}"] = float(1 - rates[reached].min())
    return values


def measure_coverage(draws: int) -> list[dict[str, Any]]:
    """Fraction of test sets whose interval holds the true value, and its mean width."""
    truth = measure_truth()
    rows = []
    for patients in PATIENTS:
        rng = np.random.default_rng(patients)
        covered: dict[str, list[bool]] = {}
        widths: dict[str, list[float]] = {}
        num_positive = []
        while len(num_positive) < draws:
            probabilities, has_finding, clusters = draw(rng, patients)
            if not has_finding.any():
                continue
            num_positive.append(len(set(clusters[has_finding].tolist())))
            for name, (_, low, high) in measure(probabilities, has_finding, clusters).items():
                covered.setdefault(name, []).append(low <= truth[name] <= high)
                widths.setdefault(name, []).append(high - low)
        for name, held in covered.items():
            rows.append(
                {
                    "patients": patients,
                    "with the finding": round(float(np.mean(num_positive)), 1),
                    "metric": name,
                    "truth": truth[name],
                    "coverage": float(np.mean(held)),
                    "width": float(np.mean(widths[name])),
                }
            )
    return rows


def measure_truth() -> dict[str, float]:
    probabilities, has_finding, _ = draw(np.random.default_rng(0), TRUTH_PATIENTS)
    truth = measure_peer(probabilities, has_finding)
    is_found = probabilities >= 0.5
    truth["sensitivity at probability=0.5"] = float(is_found[has_finding].mean())
    truth["specificity at probability=0.5"] = float((~is_found)[~has_finding].mean())
    return truth


def compare_with_peer() -> list[dict[str, Any]]:
    """Values of one test set, and their difference from scikit-learn's."""
    drawn = draw(np.random.default_rng(7), 600)
    peer = measure_peer(*drawn[:2])
    return [
        {"metric": name, "value": value, "low": low, "high": high, "difference": value - peer[name]}
        for name, (value, low, high) in measure(*drawn).items()
        if name in peer
    ]


def measure_promises(draws: int) -> list[dict[str, Any]]:
    """Rates on 100,000 other patients of thresholds that are chosen on held-out ones."""
    others, has_finding, _ = draw(np.random.default_rng(0), TRUTH_PATIENTS)
    positives, negatives = np.sort(others[has_finding]), np.sort(others[~has_finding])
    rows = []
    for patients in (300, 600, 1500):
        for text in RULES:
            rng = np.random.default_rng(patients)
            rule = parse_rule(text, NAMES)
            rates = []
            refused = 0
            for _ in range(draws):
                probabilities, marks, clusters = draw(rng, patients)
                try:
                    threshold = choose_threshold(probabilities, marks, rule, clusters)
                except ValueError:
                    refused += 1
                    continue
                hits = len(positives) - np.searchsorted(positives, threshold)
                alarms = len(negatives) - np.searchsorted(negatives, threshold)
                values = {
                    "sensitivity": hits / len(positives),
                    "specificity": 1 - alarms / len(negatives),
                    "precision": hits / max(hits + alarms, 1),
                }
                rates.append(values[rule.name])
            rows.append(
                {
                    "patients": patients,
                    "rule": text,
                    "mean": float(np.mean(rates)) if rates else None,
                    "standard error": float(np.std(rates, ddof=1) / np.sqrt(len(rates)))
                    if len(rates) > 1
                    else None,
                    "below": float(np.mean(np.array(rates) < rule.value)) if rates else None,
                    "refused": refused,
                }
            )
    return rows


def draw_labels(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels of images that may have four."""
    labels = rng.random((count, 4)) < (0.1, 0.3, 0.5, 0.2)
    return expit(rng.normal(1.5 * labels - 1, 1.0)), labels


def measure_missed(draws: int) -> list[dict[str, Any]]:
    """Fraction of an image's labels that its set misses, of images that have labels."""
    others, other_labels = draw_labels(np.random.default_rng(0), 100_000)
    has_labels = other_labels.any(axis=1)
    others, other_labels = others[has_labels], other_labels[has_labels]
    counts = other_labels.sum(axis=1)
    rows = []
    for count in (50, 100, 500):
        for coverage in LEVELS:
            rng = np.random.default_rng(count)
            missed = []
            sizes = []
            for _ in range(draws):
                threshold, _ = find_label_threshold(*draw_labels(rng, count), coverage=coverage)
                in_set = others >= (0.0 if threshold is None else threshold)
                missed.append(float(((other_labels & ~in_set).sum(axis=1) / counts).mean()))
                sizes.append(float(in_set.sum(axis=1).mean()))
            rows.append(
                {
                    "images": count,
                    "promised": round(1 - coverage, 9),
                    "missed": float(np.mean(missed)),
                    "standard error": float(np.std(missed, ddof=1) / np.sqrt(draws)),
                    "labels in a set": float(np.mean(sizes)),
                }
            )
    return rows


def format_rows(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        cells = [
            f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=500, help="test sets of each size")
    parser.add_argument("--output", type=Path, help=f"folder for {NAME}-<machine>.json")
    options = parser.parse_args()
    start = time.process_time()
    result: dict[str, Any] = {"machine": describe_conditions("cpu"), "draws": options.draws}
    result["beside scikit-learn"] = compare_with_peer()
    result["coverage"] = measure_coverage(options.draws)
    result["promises"] = measure_promises(200)
    result["missed labels"] = measure_missed(200)
    result["processor seconds"] = round(time.process_time() - start)
    for part in ("beside scikit-learn", "coverage", "promises", "missed labels"):
        print(f"\n{part}\n\n{format_rows(result[part])}")
    if options.output:
        write_result(options.output, NAME, result)


if __name__ == "__main__":
    main()
