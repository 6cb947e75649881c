"""`vit.measure_faithfulness`: the images, the benchmark on them, and its conditions."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from vit.analysis.faithfulness.benchmark import MIN_IMAGES, Benchmark
from vit.analysis.faithfulness.result import FaithfulnessResult
from vit.bundle import Bundle, ModelLike, collect_versions, keeps_mode, open_model
from vit.data.dataset import ImageDataset
from vit.evaluation.images import check_data, find_labels, open_data
from vit.explanation.explainer import choose_explain_batch_size
from vit.explanation.methods.registry import find_methods, list_methods
from vit.explanation.targets import (
    CLASS,
    LABEL,
    Target,
    TargetLike,
    build_target,
    describe_target,
    find_output_kind,
)
from vit.model.logits import compute_logits
from vit.prediction.decision import decide_classes, decide_labels
from vit.prediction.labels import compute_probabilities
from vit.prediction.predictor import BatchPredictor, Pixels, read_from
from vit.prediction.probabilities import Bools, Float32s, Ints
from vit.runtime.arguments import accept_old_names, as_tuple, check_arguments
from vit.runtime.device import describe_device
from vit.runtime.progress import show_progress
from vit.runtime.tensors import Images


@accept_old_names(count="num_images")
@check_arguments(num_images=(8, None), minutes=(0.1, None), batch_size=(1, None))
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
    target: TargetLike = "auto",
    num_images: int = 128,
    minutes: float | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: str = "auto",
    random_weights: bool = False,
) -> FaithfulnessResult:
    """Measure how faithful attention maps are to the model.

    Args:
        model: See `vit.evaluate`.
        data: See `vit.evaluate`.
        root: See `vit.evaluate`.
        split: See `vit.evaluate`.
        dataset: See `vit.evaluate`.
        class_names: See `vit.evaluate`.
        methods: Names of map methods, or "all".
        target: Class to explain. "auto": the true class of each image that is
            predicted correctly, or its most probable label that is. Any other
            target of `vit.explain` for one class is measured on images whatever
            the model predicts for them: removing patches lowers its value,
            adding them raises it.
        num_images: Images to measure on, at least 8.
        minutes: Time limit, approximately. If not everything fits into it,
            leave-one-out leaves out larger groups, curves have fewer points,
            and fewer images are measured, at least 8; a note says so.
            None: no limit.
        batch_size: See `vit.explain`.
        seed: Seed for the choice of images and for the random maps.
        device: See `vit.evaluate`.
        random_weights: Measure the same model untrained, as a sanity check.

    Returns:
        The result: `.summary` holds means with 95 % intervals by metric and
        method, `.table` the same as text.

    Raises:
        ValueError: A method is unknown, or fewer than 8 images are predicted
            correctly.

    Example:
        >>> result = vit.measure_faithfulness("runs/digits", methods="gae")
        >>> print(result.table)
    """
    check_data(data, dataset)
    names = list(as_tuple(methods))
    if names == ["all"]:
        names = list_methods()
    # a wrong name is reported before the model is loaded
    find_methods(names)
    bundle = open_model(model, device=device, random_weights=random_weights)
    source = open_data(bundle, data, root, dataset, class_names).split(split)
    batch_size = batch_size or choose_explain_batch_size(
        bundle.preprocess.image_size, bundle.device
    )
    images, classes, ids, measured = _choose_images(
        bundle, source, target, count=num_images, batch_size=batch_size, seed=seed
    )
    benchmark = Benchmark(
        bundle, images, classes, names, measured, batch_size=batch_size, seed=seed
    )

    if minutes is not None:
        benchmark.fit(60 * minutes)
        # the limit may have left out the last images
        ids = ids[: len(benchmark.images)]
    work, _ = benchmark.plan
    with show_progress("faithfulness", round(work)) as benchmark.advance:
        measurement = benchmark.measure()

    # a reader needs these to repeat the measurement
    conditions = {
        "model": bundle.name,
        "model_sha256": bundle.sha256,
        "run_id": bundle.metadata.get("run_id"),
        "data": source.name,
        "split": source.split,
        "target": describe_target(target),
        "num_images": len(ids),
        "seed": seed,
        "device": describe_device(bundle.device),
        "precision": benchmark.precision,
        "versions": collect_versions(),
    }
    return FaithfulnessResult(measurement, conditions, ids)


@torch.no_grad()
def _choose_images(
    bundle: Bundle,
    source: ImageDataset,
    target: TargetLike,
    *,
    count: int,
    batch_size: int,
    seed: int,
) -> tuple[Images, Int[Tensor, " n"], list[str], Target]:
    """Choose images, as the model takes them.

    Returns:
        The images, the class of each that is explained, their ids, and the target.
    """
    kind = find_output_kind(bundle.model, bundle.class_names, is_multilabel=bundle.is_multilabel)
    if target == "auto" and kind in ("classes", "labels"):
        # no map can point at evidence for a wrong prediction
        correct = select_correct_images(
            bundle, source, count=count, batch_size=batch_size, seed=seed
        )
        return *correct, LABEL if bundle.is_multilabel else CLASS
    measured = build_target(target, bundle.class_names, kind)
    chosen = dict(islice(_read_shuffled(bundle, source, seed), count))
    images, ids = _prepare(bundle, source, chosen, "can be read")
    classes = torch.cat(
        [
            measured.choose(compute_logits(bundle.model, batch.to(bundle.device)))
            for batch in torch.split(images, batch_size)
        ]
    )
    if classes.shape[1] != 1 or measured.classes is not None:
        raise ValueError(
            f"faithfulness is measured for one class of each image, not for {target!r};"
            " name one, or auto"
        )
    return images, classes[:, 0], ids, measured


def select_correct_images(
    bundle: Bundle, dataset: ImageDataset, *, count: int, batch_size: int = 32, seed: int = 0
) -> tuple[Images, Int[Tensor, " n"], list[str]]:
    """Choose images that the model predicts correctly: no map can point at evidence for a wrong
    prediction. Where an image may have several labels, its most probable right one is taken.

    Args:
        bundle: The model.
        dataset: The images; unreadable ones are skipped.
        count: Number of images: the first ones in a random order.
        batch_size: Images at a time.
        seed: Seed of that order.

    Returns:
        Model inputs, classes and ids.

    Raises:
        ValueError: Fewer than `MIN_IMAGES` are predicted correctly.
    """
    labels = find_labels(dataset, bundle.class_names)
    predictor = BatchPredictor.from_bundle(bundle, batch_size=batch_size, precision="float32")
    images = _read_shuffled(bundle, dataset, seed)
    correct: dict[int, tuple[Pixels, int]] = {}
    with show_progress("choosing images", count) as advance:
        while len(correct) < count and (batch := dict(islice(images, batch_size))):
            read = read_from(list(batch.values()))
            logits = predictor.predict(read, count=len(batch))
            answers = _find_right(bundle, logits, labels[list(batch)]).tolist()
            right = {
                index: (pixels, answer)
                for (index, pixels), answer in zip(batch.items(), answers, strict=True)
                if answer >= 0
            }
            correct |= right
            advance(len(right))

    chosen = dict(islice(correct.items(), count))
    read_images = {index: pixels for index, (pixels, _) in chosen.items()}
    inputs, ids = _prepare(bundle, dataset, read_images, "are predicted correctly")
    return inputs, torch.tensor([answer for _, answer in chosen.values()]), ids


def _find_right(bundle: Bundle, logits: Float32s, labels: Ints | Bools) -> Ints:
    """Return the predicted class of each image if it is right, else -1; of several labels the most
    probable one that is."""
    probabilities = compute_probabilities(bundle, logits)
    if not bundle.is_multilabel:
        predicted = decide_classes(bundle, probabilities)
        return np.where(predicted == labels, predicted, -1)
    is_right = decide_labels(bundle, probabilities) & labels
    best: Ints = np.where(is_right, probabilities, -1).argmax(axis=1)
    return np.where(is_right.any(axis=1), best, -1)


def _read_shuffled(
    bundle: Bundle, dataset: ImageDataset, seed: int
) -> Iterator[tuple[int, Pixels]]:
    """Read images in a random order; yield index and pixels of those that can be read."""
    for index in np.random.default_rng(seed).permutation(len(dataset)).tolist():
        # unreadable images are skipped
        with suppress(ValueError, OSError):
            yield index, bundle.preprocess.to_uint8(dataset.image(index))


def _prepare(
    bundle: Bundle, dataset: ImageDataset, chosen: dict[int, Pixels], condition: str
) -> tuple[Images, list[str]]:
    """Return model inputs and ids. Raises ValueError for too few images, with their condition."""
    if len(chosen) < MIN_IMAGES:
        raise ValueError(
            f"{len(chosen)} of {len(dataset)} images {condition}; {MIN_IMAGES} are needed"
        )
    pixels = torch.from_numpy(np.stack(list(chosen.values())))
    return bundle.preprocess.normalize(pixels), [dataset.ids[index] for index in chosen]
