"""Do prediction sets hold the right class as often as promised, and are images of unknown classes
found? Small models of the digits, one a seed and split; of a second one, two of ten classes are held
out of the training.

    python benchmarks/sets.py --seeds 3 --output benchmarks/results

prints the coverage of the sets beside the interval that holds it with 95 % where the promise is kept
(beta-binomial: the validation images that the threshold is of are a sample as well), and how well
unknown classes are told apart (AUROC) by the distance to training features, the maximum probability
and the energy.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from conditions import describe_conditions, write_result
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax
from scipy.stats import betabinom
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import vit
from vit.bundle import Bundle
from vit.evaluation.conformal import LEVELS, answer_images, build_sets, read_threshold
from vit.evaluation.prediction import Predictor
from vit.explanation.faithfulness.map_metrics import to_markdown
from vit.model.logits import compute_logits_and_features, count_features

NUM_TEST = 600
UNKNOWN = (8, 9)
RECIPE = [
    "data.image_size=8", "data.validation_fraction=0.25", "model.patch_size=2", "model.embed_dim=48",
    "model.depth=3", "model.num_heads=3", "optimizer.name=muon", "optimizer.lr=6e-3",
    "optimizer.muon_lr=0.02", "schedule.warmup_epochs=0.5", "train.batch_size=64",
    "train.device=cpu", "train.precision=float32",
]  # fmt: skip

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


def split_digits(seed: int) -> tuple[Pixels, Labels, NDArray[np.bool_]]:
    """The digits, their labels, and which of them are for the test."""
    digits = load_digits()
    pixels = (digits.images[..., None].repeat(3, axis=-1) * 255 / 16).round().astype(np.uint8)
    is_test = np.zeros(len(pixels), dtype=bool)
    is_test[np.random.default_rng(seed).permutation(len(pixels))[:NUM_TEST]] = True
    return pixels, digits.target.astype(np.int64), is_test


def train(pixels: Pixels, labels: Labels, *, seed: int, epochs: int) -> Bundle:
    with tempfile.TemporaryDirectory() as folder:
        names = [str(digit) for digit in range(int(labels.max()) + 1)]
        overrides = [*RECIPE, f"train.epochs={epochs}", f"train.seed={seed}"]
        run = vit.train(
            {},
            output=Path(folder) / "run",
            dataset=(pixels, labels),
            class_names=names,
            overrides=overrides,
        )
        return run.bundle


def predict(bundle: Bundle, pixels: Pixels) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits and features."""
    predictor = Predictor.from_bundle(bundle, precision="float32")

    def read(start: int, stop: int) -> Pixels:
        return pixels[start:stop]

    features = predictor.compute(
        lambda images: compute_logits_and_features(bundle.model, images)[1],
        read,
        shape=(len(pixels), count_features(bundle.model)),
    )
    return predictor.predict(read, count=len(pixels)), features.numpy()


def measure_coverage(seed: int, *, epochs: int) -> list[dict[str, Any]]:
    """Of the sets of a model that knows all classes, by level."""
    pixels, labels, is_test = split_digits(seed)
    bundle = train(pixels[~is_test], labels[~is_test], seed=seed, epochs=epochs)
    logits, _ = predict(bundle, pixels[is_test])
    probabilities = softmax(logits.astype(np.float64), axis=1)
    num_calibration = bundle.metadata["conformal"]["num_images"]
    rows = []
    for level in LEVELS:
        threshold = read_threshold(bundle.metadata, level)
        assert threshold is not None
        sets = build_sets(probabilities, threshold)
        holds = [label in members for label, members in zip(labels[is_test], sets, strict=True)]
        rank = int(np.ceil(round((num_calibration + 1) * level, 9)))
        law = betabinom(len(sets), rank, num_calibration + 1 - rank)
        low, high = law.interval(0.95)
        rows.append(
            {
                "seed": seed,
                "level": level,
                "num_calibration": num_calibration,
                "num_test": len(sets),
                "top1": float((logits.argmax(axis=1) == labels[is_test]).mean()),
                "coverage": float(np.mean(holds)),
                "interval": [low / len(sets), high / len(sets)],
                "mean_size": float(np.mean([len(members) for members in sets])),
                "single": float(np.mean([len(members) == 1 for members in sets])),
            }
        )
    return rows


def measure_unknown(seed: int, *, epochs: int) -> dict[str, Any]:
    """How a model that knows eight classes tells the other two."""
    pixels, labels, is_test = split_digits(seed)
    is_unknown = np.isin(labels, UNKNOWN)
    is_train = ~is_test & ~is_unknown
    bundle = train(pixels[is_train], labels[is_train], seed=seed, epochs=epochs)
    chosen = is_test | is_unknown
    logits, features = predict(bundle, pixels[chosen])
    unknown = is_unknown[chosen]
    answers = answer_images(bundle, logits, features, coverage=0.95)
    p_values = np.array([answer.p_value for answer in answers], dtype=np.float64)
    is_single = np.array([len(answer.prediction_set or []) == 1 for answer in answers])
    return {
        "seed": seed,
        "p-value of the distance": float(roc_auc_score(unknown, -p_values)),
        "maximum probability": float(roc_auc_score(unknown, -softmax(logits, axis=1).max(axis=1))),
        "energy": float(roc_auc_score(unknown, -logsumexp(logits, axis=1))),
        # at a level of 5 %
        "known_called_unlike": float((p_values[~unknown] <= 0.05).mean()),
        "unknown_called_unlike": float((p_values[unknown] <= 0.05).mean()),
        # an answer in spite of both
        "unknown_answered": float((is_single & (p_values > 0.05))[unknown].mean()),
    }


def build_table(result: dict[str, Any]) -> str:
    """Coverage by seed and level, and the AUROC of each score."""
    coverage = [
        [
            f"{row['level']:.0%}",
            str(row["seed"]),
            f"{100 * row['coverage']:.1f} %",
            f"{100 * row['interval'][0]:.1f} … {100 * row['interval'][1]:.1f} %",
            f"{100 * row['single']:.1f} %",
            f"{row['mean_size']:.2f}",
        ]
        for row in sorted(result["coverage"], key=lambda row: (row["level"], row["seed"]))
    ]
    headings = [
        "promised",
        "seed",
        "held the label",
        "expected in 95 %",
        "one class",
        "classes a set",
    ]
    scores = ("p-value of the distance", "maximum probability", "energy")
    unknown = [[name, *(f"{row[name]:.3f}" for row in result["unknown"])] for name in scores]
    for name, key in (
        ("known photos called unlike (5 % promised)", "known_called_unlike"),
        ("unknown photos called unlike", "unknown_called_unlike"),
        ("unknown photos that still get one class", "unknown_answered"),
    ):
        unknown.append([name, *(f"{100 * row[key]:.1f} %" for row in result["unknown"])])
    seeds = [f"seed {row['seed']}" for row in result["unknown"]]
    return "\n\n".join(
        [
            to_markdown(headings, coverage),
            to_markdown(["AUROC, two classes held out", *seeds], unknown),
        ]
    )


def main() -> None:
    """Train, measure, print and write."""
    parser = argparse.ArgumentParser(description="Do prediction sets keep their promise?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, help="folder for sets-<machine>.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_conditions("cpu"), "coverage": [], "unknown": []}
    for seed in range(options.seeds):
        result["coverage"] += measure_coverage(seed, epochs=options.epochs)
        result["unknown"].append(measure_unknown(seed, epochs=options.epochs))
        print(result["coverage"][-2:], result["unknown"][-1], flush=True)
    print(build_table(result))
    if options.output:
        write_result(options.output, "sets", result)


if __name__ == "__main__":
    main()
