"""`vit.measure_faithfulness`: the images, their maps, and what removing patches does."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from vit.analysis.faithfulness.gains import (
    PatchMaps,
    PerImage,
    build_baselines,
    build_probability,
    compute_gain,
)
from vit.analysis.faithfulness.result import GAINS, FaithfulnessResult
from vit.bundle import Bundle, ModelLike, keeps_mode, open_model
from vit.data.dataset import ImageDataset
from vit.evaluation.images import check_data, find_labels, open_data
from vit.explanation.capture.reader import ModelReader, read_model
from vit.explanation.methods.maps import (
    choose_explain_batch_size,
    compute_maps,
    find_methods,
    list_methods,
)
from vit.explanation.patch_removal import build_removal
from vit.explanation.targets import CLASS, LABEL, Target
from vit.prediction.batch_predictor import BatchPredictor, read_dataset
from vit.prediction.decision import (
    compute_probabilities,
    decide_classes,
    decide_labels,
    read_thresholds,
)
from vit.prediction.probabilities import Bools, Float32s, Ints
from vit.runtime.arguments import as_tuple, check_minimum
from vit.runtime.device import choose_precision, copy_to_host, describe_device
from vit.runtime.progress import show_progress
from vit.runtime.tensors import Images
from vit.runtime.version import collect_versions

# an interval over fewer images says nothing
MIN_IMAGES = 8
# images that are predicted for each that is asked for
_DRAWN = 4


@keeps_mode
def measure_faithfulness(
    model: ModelLike,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    dataset: Any = None,
    class_names: Sequence[str] | None = None,
    methods: str | Sequence[str] = "all",
    num_images: int = 128,
    batch_size: int | None = None,
    device: str = "auto",
) -> FaithfulnessResult:
    """Measure how faithful attention maps are to the model.

    The maps explain the true class of images that are predicted correctly, or
    the most probable label that is.

    Args:
        model: See `vit.evaluate`.
        data: See `vit.evaluate`.
        root: See `vit.evaluate`.
        split: See `vit.evaluate`.
        dataset: See `vit.evaluate`.
        class_names: See `vit.evaluate`.
        methods: Names of map methods, or "all".
        num_images: Images to measure on, at least 8.
        batch_size: See `vit.explain`.
        device: See `vit.evaluate`.

    Returns:
        The result: `.summary` holds means with 95 % intervals by metric and
        method, `.rows` the table, `.values` the gain of each image.

    Raises:
        ValueError: A method is unknown, or fewer than 8 images are predicted
            correctly.

    Example:
        >>> result = vit.measure_faithfulness("runs/digits", methods="gae")
        >>> result.rows  # the table that the command prints
    """
    check_minimum(MIN_IMAGES, num_images=num_images)
    check_minimum(1, batch_size=batch_size)
    check_data(data, dataset)
    names = list(as_tuple(methods))
    if names == ["all"]:
        names = list_methods()
    # a wrong name is reported before the model is loaded
    find_methods(names)
    bundle = open_model(model, device=device, class_names=class_names)
    source = open_data(bundle, data, root, dataset).split(split)
    batch_size = batch_size or choose_explain_batch_size(
        bundle.preprocess.image_size, bundle.device
    )
    images, classes, ids = select_correct_images(
        bundle, source, count=num_images, batch_size=batch_size
    )
    images, classes = images.to(bundle.device), classes.to(bundle.device)
    target = LABEL if bundle.is_multilabel else CLASS
    reader = read_model(bundle.model, images)
    maps = _compute_all(reader, images, classes, names, target=target, batch_size=batch_size)
    _, rows, columns = maps[names[0]].shape
    maps |= build_baselines(len(images), (rows, columns))

    precision = choose_precision("auto", bundle.device)
    options: Any = {"grid": (rows, columns), "precision": precision, "batch_size": batch_size}
    values: dict[str, dict[str, PerImage]] = {}
    with show_progress("faithfulness", len(GAINS) * len(maps)) as advance:
        for metric, fill in GAINS.items():
            compute_kept = build_removal(reader, images, fill=fill, **options)
            predict = build_probability(compute_kept, classes, target=target)
            values[metric] = {}
            for name, of_map in maps.items():
                gain = compute_gain(predict, of_map.to(images.device))
                values[metric][name] = gain.cpu().numpy()
                advance(1)
    notes = []
    if not reader.can_drop_tokens:
        notes.append(
            f"{type(bundle.model).__name__} needs all of its tokens: patches get the mean fill"
            " instead of being dropped"
        )
    # a reader needs these to repeat the measurement
    conditions = {
        "model": bundle.name,
        "model_sha256": bundle.sha256,
        "data": source.name,
        "split": source.split,
        "num_images": len(ids),
        "device": describe_device(bundle.device),
        "precision": precision,
        "versions": collect_versions(),
    }
    return FaithfulnessResult(values, conditions, notes, ids)


def _compute_all(
    reader: ModelReader,
    images: Images,
    classes: Int[Tensor, " n"],
    methods: Sequence[str],
    *,
    target: Target,
    batch_size: int,
) -> dict[str, PatchMaps]:
    """Compute the maps [n, rows, columns] of each method, on the CPU."""
    parts = []
    batches = (torch.split(each, batch_size) for each in (images, classes))
    for part, answers in zip(*batches, strict=True):
        chosen = target.with_classes(answers)
        _, _, found = compute_maps(reader, part, methods=methods, target=chosen)
        parts.append(copy_to_host(found))
    joined = map(torch.cat, zip(*parts, strict=True))
    return {name: values[:, 0] for name, values in zip(methods, joined, strict=True)}


def select_correct_images(
    bundle: Bundle, dataset: ImageDataset, *, count: int, batch_size: int
) -> tuple[Images, Int[Tensor, " n"], list[str]]:
    """Choose images that the model predicts correctly: no map can point at evidence for a wrong
    prediction. They are the first `count` in a random order, of at most four times as many.

    Returns their model inputs, classes and ids. Raises ValueError if fewer than `MIN_IMAGES` are
    predicted correctly, or one can't be read.
    """
    labels = find_labels(dataset, bundle.class_names)
    order = np.random.default_rng(0).permutation(len(dataset))[: _DRAWN * count]
    read = partial(read_dataset, dataset.subset(order), bundle.preprocess)
    predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size, precision="float32")
    with show_progress("choosing images", len(order)) as advance:
        logits = predictor.predict(read, count=len(order), on_progress=advance)
    right = find_right(bundle, logits, labels[order])
    chosen = np.flatnonzero(right >= 0)[:count]
    if len(chosen) < MIN_IMAGES:
        raise ValueError(
            f"{len(chosen)} of {len(order)} images are predicted correctly; {MIN_IMAGES} are needed"
        )
    pixels = np.concatenate([read(place, place + 1) for place in chosen.tolist()])
    images = bundle.preprocess.normalize(torch.from_numpy(pixels))
    ids = [dataset.ids[place] for place in order[chosen].tolist()]
    return images, torch.from_numpy(right[chosen]), ids


def find_right(bundle: Bundle, logits: Float32s, labels: Ints | Bools) -> Ints:
    """Return the predicted class of each image if it is right, else -1; of several labels the most
    probable one that is."""
    probabilities = compute_probabilities(bundle, logits)
    if not bundle.is_multilabel:
        predicted = decide_classes(read_thresholds(bundle), probabilities)
        return np.where(predicted == labels, predicted, -1)
    is_right = decide_labels(bundle, probabilities) & labels
    best: Ints = np.where(is_right, probabilities, -1).argmax(axis=1)
    return np.where(is_right.any(axis=1), best, -1)
