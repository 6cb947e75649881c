"""What research/growth.py measures by images, files and classes."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from growth_models import Run, draw_pixels, make_bundle
from PIL import Image

from tests.explanation.collector import explain_with
from vit.bundle import Bundle
from vit.config import AugmentConfig
from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.loader import TrainLoader
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.data.sources.base import ArrayReader
from vit.evaluation.cost import Cost
from vit.evaluation.examples import Examples
from vit.evaluation.images import EvaluationSet
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.metrics import (
    Scores,
    compute_metrics,
    compute_per_class,
    bin_confidence,
    score_logits,
)
from vit.evaluation.predictions import write_predictions as write_table
from vit.evaluation.report.confusion import plot_confusion
from vit.evaluation.report.report import build_report
from vit.evaluation.result import Evaluation, EvaluationResult
from vit.explanation.gallery.gallery import Gallery
from vit.explanation.items import ImageItem
from vit.explanation.records import ImageResult
from vit.explanation.writer import MapWriter

GALLERY = 6_000  # images, at most


@cache
def explain_one() -> tuple[Bundle, ImageResult]:
    bundle, found = make_bundle(64), list[ImageResult]()
    gallery = Gallery(bundle, num_images=GALLERY)
    item = ImageItem("photo", "photo", lambda: (Image.fromarray(draw_pixels(224)), "0" * 64))
    settings = {"methods": ("rollout", "legrad"), "batch_size": 1}
    explain_with(bundle, [item], settings, found.extend, token_bytes=gallery.token_bytes)
    return bundle, found[0]


def write_gallery(count: int, folder: Path) -> Run:
    bundle, explained = explain_one()

    def run() -> int:
        gallery = Gallery(bundle, num_images=count)
        for _ in range(count):
            gallery.add([explained])
        gallery.write(folder / "gallery.html", title="gallery")
        return max(path.stat().st_size for path in folder.glob("*.html"))

    return run


def write_maps(count: int, folder: Path) -> Run:
    bundle, explained = explain_one()

    def run() -> int:
        with MapWriter(
            folder / "maps",
            bundle,
            {"methods": ["rollout", "legrad"]},
            formats=("npz",),
        ) as writer:
            for number in range(count):
                maps = [replace(found, key=f"{number}.{found.key}") for found in explained.maps]
                writer.add([replace(explained, maps=maps)])
        return max(path.stat().st_size for path in (folder / "maps").iterdir())

    return run


def make_scores(count: int, num_classes: int) -> Scores:
    random = np.random.default_rng(0)
    labels, values = random.integers(num_classes, size=count), random.random(count)
    predicted = np.where(values < 0.8, labels, random.integers(num_classes, size=count))
    of_images = dict.fromkeys(("confidence", "label_probability", "loss", "nll", "brier"), values)
    rank = np.where(labels == predicted, 0, 1)
    return Scores(
        labels, predicted, **of_images, rank=rank, num_classes=num_classes, temperature=1.0
    )


def measure_intervals(scores: Scores) -> Run:
    return partial(compute_intervals, scores)


def score(count: int, num_classes: int) -> Run:
    logits = np.random.default_rng(0).standard_normal((count, num_classes), dtype=np.float32)
    labels = np.zeros(count, np.int64)

    return partial(score_logits, logits, labels)


def make_source(count: int, num_classes: int = 10, *, side: int = 1) -> ImageDataset:
    pixels = np.broadcast_to(draw_pixels(side), (count, side, side, 3))
    names, ids = (
        tuple(f"class {index}" for index in range(num_classes)),
        [f"train/{i:07d}.jpg" for i in range(count)],
    )
    labels = np.random.default_rng(0).integers(num_classes, size=count)
    return ImageDataset(
        name="made up", class_names=names, labels=labels, ids=ids, reader=ArrayReader(pixels)
    )


def make_dataset(count: int, num_classes: int = 10) -> ImageDataset:
    source = make_source(count, num_classes, side=32)
    assert isinstance(source.reader, ArrayReader)
    hashes = np.random.default_rng(0).integers(0, 2**63, (2, count), dtype=np.uint64)
    return replace(source, split="train", pixels=source.reader.pixels, hashes=hashes)


def write_report(count: int, num_classes: int) -> Callable[[Path], Run]:
    scores, dataset = make_scores(count, num_classes), make_dataset(count, num_classes)
    values = compute_metrics(scores)
    evaluation = Evaluation(
        **values,
        intervals={name: (value, value) for name, value in values.items()},
        per_class=compute_per_class(scores, dataset.class_names),
        reliability=bin_confidence(scores.confidence, scores.correct),
        calibration=None,
        num_images=count,
        unreadable=[],
        duplicates_of_training=None,
        examples=Examples([], [], [], 0),
        corruptions=None,
        mean_corruption_error=None,
        cost=Cost(1, 1, 1, 1.0, 1.0, 1.0, 1, "process", 1),
        **dict.fromkeys(("data", "split", "fingerprint", "model", "model_sha256"), "made up"),
        notes=[],
        recipe=None,
        seed=None,
        conditions={"device": "cpu", "precision": "float32"},
    )
    images = EvaluationSet(dataset, dataset.ids, scores.labels, Preprocess((32, 32)))
    result = EvaluationResult(
        evaluation, scores, images, make_bundle(32), np.zeros((count, num_classes), np.float32)
    )

    def prepare(folder: Path) -> Run:
        return lambda: len(build_report(result).encode())

    return prepare


def write_predictions(count: int, folder: Path) -> Run:
    scores, ids = make_scores(count, 10), make_source(count).ids
    logits = np.random.default_rng(0).normal(size=(count, 10)).astype(np.float32)

    def run() -> int:
        path = folder / "predictions.csv"
        write_table(path, scores, ids=ids, class_names=tuple("abcdefghij"), logits=logits)
        return path.stat().st_size

    return run


def draw_split(count: int, num_classes: int) -> Run:
    source = make_source(count, num_classes)

    def run() -> None:
        splits = open_dataset("digits")
        made_up = SourceSplits({"train": "made up"}, lambda split: source)
        replace(splits, source=made_up).split("train")

    return run


def take_fingerprint(count: int, folder: Path) -> Run:
    dataset = make_dataset(count)

    def run() -> None:
        assert dataset.fingerprint

    return run


def draw_order(count: int, folder: Path) -> Run:
    return StatelessRandom(0, 0, torch.arange(count)).permutation


def start_loader(count: int, folder: Path) -> Run:
    """Two worker processes and their first batch."""
    dataset, preprocess = make_dataset(count), Preprocess((32, 32))

    def run() -> None:
        of_batch: dict[str, Any] = {
            "batch_size": 16,
            "preprocess": preprocess,
            "augment": AugmentConfig(),
        }
        loader = TrainLoader(dataset, **of_batch, seed=0, device="cpu", workers=2)
        next(batches := loader.epoch(0))
        batches.close()
        loader.close()

    return run


# --- what lists images
# --------------------------------------------------------------------------------------


def make_files(count: int, folder: Path) -> Path:
    """Links to a few small PNG files in ten class folders, made once for each count; a table names
    them too."""
    root = folder.parent / f"files-{count}"
    if not root.exists():
        rows = ["path,label"]
        for number in range(count):
            place = root / f"class{number % 10}" / f"{number:07d}.png"
            if number < 10:
                place.parent.mkdir(parents=True)
            if number % 10_000 == 0:  # file systems allow some 65,000 links to a file
                Image.fromarray(draw_pixels(16) + np.uint8(number // 10_000)).save(
                    original := place
                )
            else:
                os.link(original, place)
            rows.append(f"{place.relative_to(root)},{place.parent.name}")
        (folder.parent / f"files-{count}.csv").write_text(
            "\n".join(rows).replace("class", f"files-{count}/class")
        )
    return root


def open_folder(count: int, folder: Path) -> Run:
    root = make_files(count, folder)

    def run() -> None:
        assert len(open_dataset("folder", root=root, cache_dir=folder).split("all")) == count

    return run


def open_table(count: int, folder: Path) -> Run:
    table = make_files(count, folder).with_suffix(".csv")

    def run() -> None:
        assert len(open_dataset("folder", root=table, cache_dir=folder).split("all")) == count

    return run


def open_parquet(count: int, folder: Path) -> Run:
    """The files of the images are a few bytes each: what is measured is the index."""
    import pyarrow
    from pyarrow import parquet

    images = [{"bytes": b"\x89PNG", "path": None}] * count
    table = pyarrow.table({"image": images, "label": np.arange(count) % 10})
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": list("abcdefghij")},
    }
    described = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(described), folder / "train.parquet")

    def run() -> None:
        dataset = open_dataset("huggingface", root=folder / "train.parquet", cache_dir=folder)
        assert len(dataset.split("all")) == count

    return run


def start_listed(count: int, folder: Path) -> Run:
    """What comes before the first step where images are decoded as training goes."""
    root = make_files(count, folder)

    def run() -> None:
        assert open_dataset("folder", root=root, cache_dir=folder).split("all").fingerprint

    return run


def write_confusion(num_classes: int, folder: Path) -> Run:
    scores, names = (
        make_scores(10_000, num_classes),
        tuple(f"class {index}" for index in range(num_classes)),
    )
    return lambda: plot_confusion(scores, class_names=names).savefig(
        folder / "confusion.png", dpi=120
    )


def describe_classes(num_classes: int, folder: Path) -> Run:
    """The table of classes in evaluation.json."""
    scores, names = (
        make_scores(10_000, num_classes),
        tuple(f"class {index}" for index in range(num_classes)),
    )
    return lambda: len(json.dumps([asdict(each) for each in compute_per_class(scores, names)]))


def choose_half(num_classes: int, folder: Path) -> Run:
    """data.classes: half of them, or both of two."""
    source = make_source(10_000, num_classes)
    return partial(source.keep_classes, source.class_names[: max(num_classes // 2, 2)])
