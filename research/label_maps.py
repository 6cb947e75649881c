"""How much of a label's evidence lies in the part of the picture that has it?

    PYTHONPATH=.:benchmarks:research python research/label_maps.py MODEL FOLDER --grid 2 2 \
        --output benchmarks/results

FOLDER has photos that were put together from others, side by side, and labels.csv with the columns
`path`, `split` and `cells`: the label of each part in reading order. For each test image and each
label that exactly one part has, the positive values of the label's map are summed over that part
and divided by their sum. By chance it is 1 of the number of parts. The three methods that are named
are those that `vit faithfulness --num-images 8 --minutes 1` found most faithful to the model.

Mosaics and pairs: `label_maps.py make SOURCE FOLDER TRAIN TEST --grid 2 2 --side 32`, SOURCE with
`train/CLASS/` and `test/CLASS/` (or `val/`). The results are of models that trained on them by

    vit train FOLDER --output MODEL --minutes 6
"""

import argparse
import csv
import sys
from pathlib import Path

import numpy as np
from conditions import describe_conditions, write_result
from PIL import Image, ImageOps

import vit
from vit.explanation.methods.registry import METHODS

CELLS = "cells"
NUM_FAITHFUL, MINUTES = 8, 1


def make(source: Path, folder: Path, counts: dict[str, int], grid: tuple[int, int], side: int) -> None:
    """Put photos of random classes together; a class may occur several times."""
    random = np.random.default_rng(0)
    rows, columns = grid
    number = rows * columns
    lines = []
    for split, count in counts.items():
        origin = source / split if (source / split).is_dir() else source / "val"
        files = {place.name: sorted(place.iterdir()) for place in sorted(origin.iterdir())}
        (folder / split).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            different = int(random.integers(1, number + 1))
            names = random.choice(list(files), size=different, replace=False)
            cells = [*names, *random.choice(names, size=number - different)]
            random.shuffle(cells)
            # square, because the model sees the square in the middle
            whole = max(grid) * side
            width, height = whole // columns, whole // rows
            picture = Image.new("RGB", (whole, whole))
            for place, name in enumerate(cells):
                photo = Image.open(files[name][random.integers(len(files[name]))]).convert("RGB")
                corner = (place % columns * width, place // columns * height)
                picture.paste(ImageOps.fit(photo, (width, height)), corner)
            path = f"{split}/{index:05}.png"
            picture.save(folder / path)
            lines.append((path, "|".join(sorted(set(cells))), split, " ".join(cells)))
    with open(folder / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "labels", "split", CELLS), *lines])


def choose_methods(model: str, seed: int = 0) -> tuple[list[str], dict[str, float]]:
    """Return the three most faithful methods, the best first, and the gain of every method."""
    result = vit.measure_faithfulness(model, num_images=NUM_FAITHFUL, minutes=MINUTES, seed=seed)
    metrics = result.summary["metrics"]
    gains = {
        name: metrics["srg"]["methods"][name]["mean"]
        for name in metrics["srg"]["methods"]
        if name in METHODS
    }
    names = sorted((name for name in gains if METHODS[name].class_specific), key=lambda name: -gains[name])
    return names[:3], gains


def measure_shares(
    model: str, folder: Path, methods: list[str], grid: tuple[int, int], max_images: int, named: str | None
) -> dict[str, dict[str, dict[str, object]]]:
    """Measure the share of each method's evidence that lies in the label's part, by label."""
    with open(folder / "labels.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
    cases = [
        (row["path"], name, row[CELLS].split().index(name))
        for row in rows
        for name in sorted(set(row[CELLS].split()))
        if row[CELLS].split().count(name) == 1
    ]
    shares: dict[str, dict[str, list[tuple[float, bool]]]] = {name: {} for name in methods}
    names = sorted({name for _, name, _ in cases})
    bundle = vit.load_bundle(model)
    for label in names:
        count = max_images if named in (None, label) else max_images // 10
        chosen = [case for case in cases if case[1] == label][:count]
        result = vit.explain(
            bundle,
            [folder / path for path, _, _ in chosen],
            methods=methods,
            target=label,
            sanity_checks=False,
        )
        for image, (_, _, place) in zip(result.images, chosen, strict=True):
            for found in image.maps:
                inside = find_part(found.values.shape, image.geometry, grid, place)
                positive = np.maximum(found.values, 0)
                shares[found.method.name].setdefault(label, []).append(
                    # a map without evidence for the label has none inside
                    (float(positive[inside].sum() / max(positive.sum(), 1e-30)), label in label_names(image, bundle))
                )
    return {
        method: {
            **{label: summarise(values) for label, values in labels.items()},
            "all labels": summarise([value for values in labels.values() for value in values]),
        }
        for method, labels in shares.items()
    }


def label_names(image, bundle) -> list[str]:
    return [bundle.class_names[index] for index in image.labels or []]


def find_part(shape, geometry, grid, place) -> np.ndarray:
    """Which patches of the map have their centre in a part of the picture."""
    left, top, right, bottom = geometry.box
    width, height = geometry.original_size
    down = top + (np.arange(shape[0]) + 0.5) / shape[0] * (bottom - top)
    across = left + (np.arange(shape[1]) + 0.5) / shape[1] * (right - left)
    row = np.floor(down / height * grid[0]) == place // grid[1]
    column = np.floor(across / width * grid[1]) == place % grid[1]
    return row[:, None] & column


def summarise(values: list[tuple[float, bool]]) -> dict[str, object]:
    """Mean share with its 95 % interval (by image), over all images and those where the label is
    predicted."""

    def describe(shares: list[float]) -> dict[str, object]:
        count = len(shares)
        error = 1.96 * np.std(shares, ddof=1) / np.sqrt(count) if count > 1 else float("nan")
        mean = float(np.mean(shares)) if count else float("nan")
        return {"images": count, "share": round(mean, 4), "low": round(mean - error, 4), "high": round(mean + error, 4)}

    return {
        "all": describe([share for share, _ in values]),
        "predicted": describe([share for share, is_predicted in values if is_predicted]),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("places", nargs="+")
    parser.add_argument("--grid", type=int, nargs=2, default=(2, 2))
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--label")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    grid = tuple(options.grid)
    if options.places[0] == "make":
        source, folder, train, test = options.places[1:]
        make(Path(source), Path(folder), {"train": int(train), "test": int(test)}, grid, options.side)
        return
    model, folder = options.places
    best, gains = choose_methods(model)
    conditions = describe_conditions("cpu")
    shares = measure_shares(model, Path(folder), [*best, "rollout"], grid, options.images, options.label)
    evaluation = vit.evaluate(model, data=folder).evaluation
    label = options.label or "all labels"
    lines = [f"| share inside, {label} | all | predicted |", "|---|---|---|"]
    for name, labels in shares.items():
        cells = [
            "{share:.2f} ({low:.2f}–{high:.2f}), {images} images".format_map(labels[label][kind])
            for kind in ("all", "predicted")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    result = {
        "machine": conditions,
        "model_sha256": vit.load_bundle(model).sha256,
        "mean_average_precision": [evaluation.map, *evaluation.intervals["map"]],
        "chance": 1 / (grid[0] * grid[1]),
        "most faithful": best,
        "gains": gains,
        "shares": shares,
        "table": "\n".join(lines),
    }
    print(result["table"])
    if options.output:
        write_result(options.output, f"label-maps-{'mosaics' if grid[0] > 1 else 'pairs'}", result)


if __name__ == "__main__":
    sys.exit(main())
