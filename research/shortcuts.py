"""Is a planted shortcut found? Scanned digits about the middle of noisy images, on which a small
model is trained; a mark stands in the corner of some of the images of one class.

    python research/shortcuts.py --seeds 10 --output benchmarks/results
    python research/shortcuts.py --clean imagenette=DATA/imagenette/val --output benchmarks/results

prints how often the summary of what each class is recognised by flags the mark, for three sizes of
it, how far the model depends on the mark, what it flags beside the mark, and what it flags without
one. With --clean, what it flags of a model on photographs in which no mark was planted.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import describe_conditions, load_result, write_result
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

import vit
from vit.analysis.class_summary.images import SummaryImages
from vit.analysis.class_summary.records import Summary
from vit.analysis.class_summary.summarize import summarize_images
from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.vision_transformer import VisionTransformer

SIDE, PATCH, NUM_CLASSES = 32, 4, 3
MARKED_CLASS, MARKED_SHARE = 0, 0.3
# pixels of the mark's side: one patch, four and nine
SIZES = (4, 8, 12)
EPOCHS, BATCH = 8, 32
# others than those on which the summary was made: thresholds below 100, clusters of marks up to 109
FIRST_SEED = 200


@dataclass(frozen=True)
class Planted:
    """Images, uint8 [n, H, W, 3], their labels, and which of them have the mark."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    is_marked: NDArray[np.bool_]


def plant(*, size: int, seed: int, test: bool) -> Planted:
    """Digits of twice their size, up to 4 pixels from the middle of noise. `size` of the mark in the lower left
    corner, in pixels; 0 for none."""
    random = np.random.default_rng(seed)
    digits = load_digits()
    is_used = (digits.target < NUM_CLASSES) & ((np.arange(len(digits.target)) % 3 == 0) == test)
    scans = digits.images[is_used].repeat(2, axis=1).repeat(2, axis=2) * 12
    labels = digits.target[is_used].astype(np.int64)
    # the test images are few: each is placed three times
    times = 3 if test else 2
    scans = np.tile(scans, (times, 1, 1))
    labels = np.tile(labels, times)

    pixels = random.integers(0, 64, (len(labels), SIDE, SIDE, 3))
    height = scans.shape[1]
    corners = (SIDE - height) // 2 + random.integers(-4, 5, (len(labels), 2))
    for image, scan, (top, left) in zip(pixels, scans, corners.tolist(), strict=True):
        image[top : top + height, left : left + height] += scan[..., None].astype(int)
    is_marked = (labels == MARKED_CLASS) & (random.random(len(labels)) < MARKED_SHARE)
    if size:
        # the same colours in every image, as a logo has
        mark = np.random.default_rng(1).integers(0, 256, (size, size, 3))
        pixels[is_marked, SIDE - size :, :size] = mark
    return Planted(pixels.clip(0, 255).astype(np.uint8), labels, is_marked)


def train(images: Planted, *, seed: int) -> Bundle:
    """A small model, trained for seconds."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=SIDE,
        patch_size=PATCH,
        num_classes=NUM_CLASSES,
        embed_dim=32,
        depth=2,
        num_heads=2,
        global_pool="avg",
    )
    names = tuple(f"digit {label}" for label in range(NUM_CLASSES))
    bundle = Bundle.from_model(
        model, class_names=names, preprocess=Preprocess(image_size=(SIDE, SIDE))
    )
    model.train()
    inputs = bundle.preprocess.normalize(torch.from_numpy(images.pixels))
    labels = torch.from_numpy(images.labels)
    num_steps = EPOCHS * -(-len(labels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH):
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    return bundle


def summarize(bundle: Bundle, images: Planted, *, seed: int) -> Summary:
    """The summary of a model on images that it has not seen."""
    summary_images = SummaryImages(
        pixels=images.pixels,
        classes=images.labels,
        paths=[f"{number:04d}" for number in range(len(images.labels))],
    )
    return summarize_images(
        bundle, summary_images, method="libra-removal", batch_size=64, seed=seed
    )


def measure_dependence(bundle: Bundle, images: Planted, *, size: int) -> float:
    """How much more probable the marked class is, on average, of images of other classes with the
    mark than without. Of a model that doesn't look at it, 0."""
    others = images.pixels[images.labels != MARKED_CLASS]
    first_marked = images.pixels[images.is_marked][0]
    with_mark = others.copy()
    with_mark[:, SIDE - size :, :size] = first_marked[SIDE - size :, :size]

    def compute_probability(pixels: NDArray[np.uint8]) -> torch.Tensor:
        with torch.no_grad():
            logits = bundle.model(bundle.preprocess.normalize(torch.from_numpy(pixels)))
        return logits.softmax(dim=1)[:, MARKED_CLASS]

    return float((compute_probability(with_mark) - compute_probability(others)).mean())


def summarize_photos(argument: str) -> dict[str, Any]:
    """Of a model on photographs: how many clusters are suspect, and which are flagged."""
    model, _, folder = argument.partition("=")
    summary = vit.summarize_classes(model, folder).summary
    num_clusters = sum(len(row.clusters) for row in summary.classes)
    return {
        "model": model,
        "num_images": sum(row.num_images for row in summary.classes),
        "num_classes": len(summary.classes),
        "num_clusters": num_clusters,
        "num_suspect": summary.num_tests,
        "flagged": [name for name, _ in summary.flagged],
    }


def is_mark(strip: list[tuple[str, int]], *, size: int) -> bool:
    """Whether most patches of a cluster's strip lie on the mark."""
    columns = SIDE // PATCH
    length = size // PATCH
    on_mark = [
        patch // columns >= columns - length and patch % columns < length for _, patch in strip
    ]
    return sum(on_mark) > len(on_mark) / 2


def build_table(result: dict[str, Any]) -> str:
    """A row for each size of the mark."""

    def describe(trainings: list[dict[str, Any]], *, is_found: bool) -> str:
        effects = [
            f"{100 * row['dependence']:.0f}"
            for row in trainings
            if row["mark_found"] == is_found and "dependence" in row
        ]
        return ", ".join(sorted(effects, key=int)) or "–"

    rows = []
    for size in (*SIZES, 0):
        of_size = [row for row in result["trainings"] if row["size"] == size]
        if not of_size:
            continue
        num_found = sum(row["mark_found"] for row in of_size)
        num_false = sum(row["others_flagged"] > 0 for row in of_size)
        rows.append(
            [
                f"{size} × {size} pixels" if size else "none",
                f"{100 * np.mean([row['accuracy'] for row in of_size]):.1f} %",
                f"{num_found} of {len(of_size)}" if size else "–",
                describe(of_size, is_found=True) if size else "–",
                describe(of_size, is_found=False) if size else "–",
                f"{num_false} of {len(of_size)}",
            ]
        )
    headings = [
        "mark",
        "mean recall",
        "mark flagged",
        "the mark adds to the class where flagged (points)",
        "where not flagged",
        "anything else flagged",
    ]
    tables = [to_markdown(headings, rows)]
    if result.get("clean"):
        clean = [
            [
                row["model"],
                f"{row['num_images']:,}",
                str(row["num_classes"]),
                str(row["num_clusters"]),
                str(row["num_suspect"]),
                str(len(row["flagged"])),
            ]
            for row in result["clean"]
        ]
        names = ["photos without a mark", "images", "classes", "clusters", "suspect", "flagged"]
        tables.append(to_markdown(names, clean))
    return "\n\n".join(tables)


def main() -> None:
    """Train, summarise, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--clean", help="MODEL=FOLDER of photographs, instead of trainings")
    parser.add_argument("--output", type=Path, help="folder for shortcuts-<machine>.json")
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    # a run that was stopped goes on
    result: dict[str, Any] = {"machine": machine, "trainings": []}
    if options.output:
        result = load_result(options.output, "shortcuts", machine) or result
    if options.clean:
        result["clean"] = [*result.get("clean", []), summarize_photos(options.clean)]
        print(build_table(result))
        if options.output:
            write_result(options.output, "shortcuts", result)
        return

    trainings = result["trainings"]
    done = {(row["size"], row["seed"]) for row in trainings}
    for size in (*SIZES, 0):
        for seed in range(FIRST_SEED, FIRST_SEED + options.seeds):
            if (size, seed) in done:
                continue
            bundle = train(plant(size=size, seed=seed, test=False), seed=seed)
            images = plant(size=size, seed=1000 + seed, test=True)
            summary = summarize(bundle, images, seed=seed)
            is_found = [
                name == f"digit {MARKED_CLASS}" and is_mark(cluster.strip, size=size)
                for name, cluster in summary.flagged
            ]
            trainings.append(
                {
                    "size": size,
                    "seed": seed,
                    "accuracy": float(np.mean([row.recall for row in summary.classes])),
                    "num_tests": summary.num_tests,
                    "dependence": measure_dependence(bundle, images, size=size) if size else 0.0,
                    "mark_found": any(is_found),
                    "others_flagged": is_found.count(False),
                }
            )
            print(trainings[-1], flush=True)
            if options.output:
                write_result(options.output, "shortcuts", result)
    print(build_table(result))


if __name__ == "__main__":
    main()
