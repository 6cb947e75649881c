"""Do prediction sets hold the right class as often as promised, and are images of unknown classes
found? Small models, one a seed and split; of a second one, two of ten classes are held out of the
training.

    python research/sets.py --seeds 3 --output benchmarks/results
    python research/sets.py --data cifar10=DATA/cifar10 --per-class 400 --output benchmarks/results
    python research/sets.py --data imagenette=DATA/imagenette --weights DATA/vits14 --side 224 \\
        --per-class 100 --output benchmarks/results
    python research/sets.py --data fashion_mnist=/usr/share/datasets/fashion-mnist \\
        --strangers digits --side 28 --per-class 400 --output benchmarks/results

prints the coverage of the sets beside the interval that holds it with 95 % where the promise is kept
(beta-binomial: the validation images that the threshold is of are a sample as well), and how well
unknown classes, or the images of another data set, are told apart (AUROC) by the distance to
training features, the maximum probability and the energy. A result joins those of other data in the
result file.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from conditions import describe_conditions, load_result, write_result
from numpy.typing import NDArray
from PIL import Image
from scipy.special import logsumexp, softmax
from scipy.stats import betabinom
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import vit
from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.bundle import Bundle
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.model.logits import compute_logits_and_features, count_features
from vit.prediction.conformal import (
    LEVELS,
    build_sets,
    predict_p_values,
    predict_sets,
    read_threshold,
)
from vit.prediction.predictor import BatchPredictor

NAME = "sets"
TEST_SHARE = 1 / 3
UNKNOWN = (8, 9)
RECIPE = [
    "data.validation_fraction=0.25", "model.num_heads=3", "optimizer.name=muon",
    "optimizer.lr=6e-3", "optimizer.muon_lr=0.02", "schedule.warmup_epochs=0.5",
    "train.batch_size=64", "train.device=cpu", "train.precision=float32",
]  # fmt: skip
# by the side of the images, pixels
SHAPES = {
    8: ["model.patch_size=2", "model.embed_dim=48", "model.depth=3"],
    28: ["model.patch_size=4", "model.embed_dim=96", "model.depth=4"],
    32: ["model.patch_size=4", "model.embed_dim=96", "model.depth=4", "augment.crop_padding=4"],
}

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


def read_digits(side: int) -> tuple[Pixels, Labels]:
    """scikit-learn's scanned digits, [n, side, side, 3]."""
    digits = load_digits()
    pixels = (digits.images[..., None].repeat(3, axis=-1) * 255 / 16).round().astype(np.uint8)
    resized = [np.asarray(Image.fromarray(image).resize((side, side))) for image in pixels]
    return np.stack(resized), digits.target.astype(np.int64)


def read_images(folder: str, *, side: int, per_class: int, seed: int) -> tuple[Pixels, Labels]:
    """Some images of each class of a folder's training split, [n, side, side, 3]."""
    dataset = open_dataset("folder", root=folder).split("train")
    random = np.random.default_rng(seed)
    preprocess = Preprocess(image_size=(side, side))
    pixels = []
    labels = []
    for label in range(len(dataset.class_names)):
        of_class = random.permutation(np.flatnonzero(dataset.labels == label))
        for index in of_class[:per_class].tolist():
            pixels.append(preprocess.to_uint8(dataset.image(index)))
            labels.append(label)
    return np.stack(pixels), np.array(labels, dtype=np.int64)


class Study:
    """One data set, and how models of it are trained.

    Args:
        options: of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.name, _, self.folder = options.data.partition("=")
        self.side = options.side or (32 if self.folder else 8)
        self.per_class = options.per_class
        self.weights = options.weights
        self.epochs = options.epochs
        self.strangers = options.strangers

    def read(self, seed: int) -> tuple[Pixels, Labels, NDArray[np.bool_]]:
        """The images, their labels, and which of them are for the test."""
        if self.folder:
            pixels, labels = read_images(
                self.folder, side=self.side, per_class=self.per_class, seed=seed
            )
        else:
            pixels, labels = read_digits(self.side)
        is_test = np.zeros(len(pixels), dtype=bool)
        order = np.random.default_rng(seed).permutation(len(pixels))
        is_test[order[: int(TEST_SHARE * len(pixels))]] = True
        return pixels, labels, is_test

    def train(self, pixels: Pixels, labels: Labels, *, seed: int) -> Bundle:
        """A model of these images; from pretrained weights, a linear classifier on their features."""
        overrides = [f"data.image_size={self.side}", f"train.seed={seed}", "train.device=cpu"]
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            if self.weights:
                photos = Path(folder) / "photos"
                write_images(photos, pixels, labels)
                overrides += ["data.validation_fraction=0.25"]
                # a minute is for the classifier alone
                return vit.train(
                    str(photos), output=output, overrides=overrides, init=self.weights, minutes=1
                ).bundle
            overrides += [*RECIPE, *SHAPES[self.side], f"train.epochs={self.epochs}"]
            names = [str(label) for label in range(int(labels.max()) + 1)]
            return vit.train(
                {},
                output=output,
                dataset=(pixels, labels),
                class_names=names,
                overrides=overrides,
            ).bundle


def write_images(folder: Path, pixels: Pixels, labels: Labels) -> None:
    """A folder of PNG files for each class."""
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)


def predict(bundle: Bundle, pixels: Pixels) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits and features."""
    predictor = BatchPredictor.from_bundle(bundle, precision="float32")

    def read(start: int, stop: int) -> Pixels:
        return pixels[start:stop]

    features = predictor.compute(
        lambda images: compute_logits_and_features(bundle.model, images)[1],
        read,
        shape=(len(pixels), count_features(bundle.model)),
    )
    return predictor.predict(read, count=len(pixels)), features.numpy()


def measure_coverage(study: Study, seed: int) -> list[dict[str, Any]]:
    """Of the sets of a model that knows all classes, by level."""
    pixels, labels, is_test = study.read(seed)
    bundle = study.train(pixels[~is_test], labels[~is_test], seed=seed)
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


def measure_unknown(study: Study, seed: int) -> dict[str, Any]:
    """How a model that knows eight classes tells the other two, or one that knows all of them the
    images of another data set."""
    pixels, labels, is_test = study.read(seed)
    is_unknown = np.isin(labels, UNKNOWN)
    if study.strangers:
        strangers, _ = read_digits(study.side)
        pixels = np.concatenate([pixels, strangers])
        labels = np.concatenate([labels, np.full(len(strangers), -1)])
        is_test = np.concatenate([is_test, np.ones(len(strangers), dtype=bool)])
        is_unknown = labels == -1
    is_train = ~is_test & ~is_unknown
    bundle = study.train(pixels[is_train], labels[is_train], seed=seed)
    chosen = is_test | is_unknown
    logits, features = predict(bundle, pixels[chosen])
    unknown = is_unknown[chosen]
    p_values = np.array(predict_p_values(bundle, features))
    sets = predict_sets(bundle, logits, coverage=0.95) or []
    is_single = np.array([len(classes) == 1 for classes in sets])
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
    """Of each data set: coverage by seed and level, and the AUROC of each score."""
    coverage = [
        [
            name,
            f"{row['level']:.0%}",
            str(row["seed"]),
            f"{100 * row['coverage']:.1f} %",
            f"{100 * row['interval'][0]:.1f} … {100 * row['interval'][1]:.1f} %",
            f"{100 * row['single']:.1f} %",
            f"{row['mean_size']:.2f}",
        ]
        for name, study in result["data"].items()
        for row in sorted(study["coverage"], key=lambda row: (row["level"], row["seed"]))
    ]
    headings = [
        "data",
        "promised",
        "seed",
        "held the label",
        "expected in 95 %",
        "one class",
        "classes a set",
    ]
    scores = ("p-value of the distance", "maximum probability", "energy")
    shares = (
        ("known photos called unlike (5 % promised)", "known_called_unlike"),
        ("unknown photos called unlike", "unknown_called_unlike"),
        ("unknown photos that still get one class", "unknown_answered"),
    )
    unknown = []
    for name, study in result["data"].items():
        rows = study["unknown"]
        title = f"{name}, {study['unknown_images']}"
        for score in scores:
            cells = [f"{row[score]:.3f}" for row in rows]
            unknown.append([title, f"AUROC of the {score}", ", ".join(cells)])
        for heading, key in shares:
            cells = [f"{100 * row[key]:.1f} %" for row in rows]
            unknown.append([title, heading, ", ".join(cells)])
    return "\n\n".join(
        [
            to_markdown(headings, coverage),
            to_markdown(["data, unknown images", "", "by seed"], unknown),
        ]
    )


def main() -> None:
    """Train, measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits", help="digits, or NAME=FOLDER of images")
    parser.add_argument("--side", type=int, help="of the images, pixels")
    parser.add_argument("--per-class", type=int, default=400, help="images of each class")
    parser.add_argument("--weights", type=Path, help="pretrained; a linear classifier is fitted")
    parser.add_argument("--strangers", choices=["digits"], help="unknown images of other data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, help="folder for sets-<machine>.json")
    options = parser.parse_args()
    study = Study(options)
    machine = describe_conditions("cpu")
    measured: dict[str, Any] = {"machine": machine, "coverage": [], "unknown": []}
    measured["unknown_images"] = options.strangers or "two of ten classes"
    for seed in range(options.seeds):
        measured["coverage"] += measure_coverage(study, seed)
        measured["unknown"].append(measure_unknown(study, seed))
        print(measured["coverage"][-2:], measured["unknown"][-1], flush=True)
    result = {"machine": machine, "data": {study.name: measured}}
    if options.output:
        before = load_result(options.output, NAME, machine)
        result["data"] = (before["data"] if before else {}) | result["data"]
        write_result(options.output, NAME, result)
    print(build_table(result))


if __name__ == "__main__":
    main()
