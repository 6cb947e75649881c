"""What a program calls: `vit.train(…)`, `vit.evaluate(…)` and so on. The commands call the same functions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from vit.build.data import Given
from vit.build.recipe import ConfigLike
from vit.bundle import Bundle, collect_versions, load_model
from vit.data.inputs import ImageInputs, list_images
from vit.data.open import open_for_model
from vit.data.transforms import Transform
from vit.evaluation.comparison import Comparison, compare_evaluations
from vit.evaluation.evaluate import EvaluationResult, evaluate_bundle
from vit.evaluation.evaluated_images import load_images, map_labels
from vit.evaluation.prediction import Prediction, PredictionResult, predict_images
from vit.explanation.explain import choose_batch_size, explain_items, fit_settings
from vit.explanation.explanations import Explanations
from vit.explanation.faithfulness.benchmark import Benchmark
from vit.explanation.faithfulness.best_method import replace_best, write_best_method
from vit.explanation.faithfulness.faithfulness_result import FaithfulnessResult
from vit.explanation.faithfulness.selection import select_correct_images
from vit.explanation.items import find_items
from vit.explanation.methods.table import METHODS, MapOptions, find_methods
from vit.explanation.render.explained import Settings
from vit.explanation.render.overlay import MAX_SIDE
from vit.explanation.render.write import MapWriter
from vit.pages.explanation_files import EXTRA_FORMATS, check_formats, write_explanations
from vit.pages.report import PAGES
from vit.runtime.device import choose_device, describe_device
from vit.runtime.memory import keep_freed_memory
from vit.runtime.output_dir import prepare_output
from vit.runtime.processes import join_processes
from vit.runtime.progress import show_progress
from vit.training.observers import Observer
from vit.training.result import TrainingResult

if TYPE_CHECKING:
    from vit.build.run import Run

ModelLike = str | Path | Bundle | nn.Module


def train(
    config: ConfigLike | None = None,
    *,
    output: str | Path,
    overrides: Sequence[str] = (),
    init: str | Path | None = None,
    minutes: float | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_start: "Callable[[Run, bool], object]" = lambda run, resumed: None,
    transform: Transform | None = None,
    dataset: Any = None,
    class_names: Sequence[str] | None = None,
    model: nn.Module | None = None,
    callbacks: Sequence[Observer] = (),
) -> TrainingResult:
    """Train a model and keep the run in the directory `output`.

    `config` is a YAML file, the name of a packaged recipe ("cifar10/cpu"), a dictionary of sections or a `Config`; with
    `resume` it may be left out. Where it names images, as `evaluate` takes them, the configuration is chosen for them
    and for `minutes` of training, by default 5 on a CPU and 20 on a GPU. `overrides` such as "train.epochs=20" are
    applied to it. `init`, a model file, a run directory or "timm:NAME", has the weights to start from. `resume`
    continues the run in `output` from its last checkpoint, `overwrite` replaces it. `on_start` is called in the main
    process with the run that is about to start, and whether it was resumed; with `dry_run` that and the picture of a
    batch are all.

    `transform` (of albumentations, torchvision, or any function) is called on every training image, uint8 [H, W, 3],
    before the augmentation of the configuration. `dataset` replaces its data: a data set of torch of (PIL image or
    uint8 array, label), a pair of them (training, validation), or arrays (images uint8 [n, H, W, 3], labels [n]) whose
    classes `class_names` names. `model` replaces its model: any module from images [B, 3, H, W] to logits [B, C], which
    is trained itself. `callbacks` see the run's events and may end it. Resuming takes the same of each again.

    Raises ValueError for a wrong configuration, FileExistsError where `output` holds another run, `Stopped` of
    `vit.training.signals` after SIGINT or SIGTERM, with the state saved, `LostProcess` where another process ends.
    """
    from vit.build.train_model import train_model  # with torch's sharding, which takes a second to import

    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give one of them")
    given = Given(transform=transform, dataset=dataset, class_names=class_names, model=model, callbacks=callbacks)
    return train_model(
        config, Path(output), given, overrides=overrides, init=init, minutes=minutes, resume=resume,
        overwrite=overwrite, dry_run=dry_run, on_start=on_start,
    )  # fmt: skip


def evaluate(
    model: ModelLike,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    calibrate: bool = False,
    corruptions: bool = False,
    shift: bool = False,
    rotate: bool = False,
    mirrored: bool = False,
    num_examples: int = 16,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> EvaluationResult:
    """Measure a model on images that it has not seen; `.evaluation` holds the metrics and their 95 % intervals.

    `data` is a data set's name (which is at `root`), a folder or shards; by default what the model was trained on.
    `split` is by default "test", or "all" of a folder without one. `calibrate` fits a temperature on the validation
    split and keeps it in the model file. `corruptions`, `shift` and `rotate` add the accuracy on images changed so;
    `mirrored` averages the logits of an image and its mirror image. `num_examples` errors are kept, of each kind.

    Raises ValueError for unknown data and for classes that the model doesn't know.
    """
    if calibrate and (str(model).startswith("timm:") or split in ("validation", "all")):
        raise ValueError("--calibrate needs a model file to keep the temperature in, and --split test")
    with join_processes(device) as (process, device_name):
        bundle = _load(model, device_name)
        dataset = open_for_model(data, root=root, trained_on=bundle.config.get("data", {}))

        of_model: dict[str, Any] = {"preprocess": bundle.preprocess, "class_names": bundle.class_names}
        images = load_images(dataset, split, **of_model, progress=process.is_main)
        validation = load_images(dataset, "validation", **of_model, progress=process.is_main) if calibrate else None
        changes: dict[str, Any] = {"corruptions": corruptions, "shift": shift, "rotate": rotate, "mirrored": mirrored}
        settings: dict[str, Any] = {"num_examples": num_examples, "batch_size": batch_size, "precision": precision}
        result = evaluate_bundle(bundle, images, validation=validation, **changes, **settings)
    return replace(result, pages=PAGES)


def predict(
    model: ModelLike,
    images: ImageInputs,
    *,
    top_k: int = 5,
    batch_size: int = 64,
    device: str = "auto",
    precision: str = "auto",
) -> PredictionResult:
    """The `top_k` most probable classes of each image, in order: `.predictions`.

    `images`: paths, folders, PIL images, uint8 arrays [H, W, 3], or one of them. An image that can't be read has an
    `error` instead of classes.
    """
    found = iterate_predictions(model, images, top_k=top_k, batch_size=batch_size, device=device, precision=precision)
    return PredictionResult(list(found))


def iterate_predictions(
    model: ModelLike, images: ImageInputs, *, top_k: int, batch_size: int, device: str, precision: str
) -> Iterator[Prediction]:
    """`predict` for any number of images, one batch in memory at a time."""
    yield from predict_images(_load(model, device), images, top_k=top_k, batch_size=batch_size, precision=precision)


@torch.inference_mode(False)  # a model that is loaded in it could not be differentiated
def explain(
    model: ModelLike,
    images: ImageInputs | None = None,
    *,
    methods: str | Sequence[str] = ("rollout",),
    target: int | str = "auto",
    options: MapOptions | None = None,
    scale: str = "image",
    sanity_checks: bool | None = None,
    count: int = 16,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "float32",
    random_weights: bool = False,
    output: str | Path | None = None,
    formats: Sequence[str] = ("png", "npz"),
    max_side: int = MAX_SIDE,
    resume: bool = False,
    overwrite: bool = False,
) -> Explanations:
    """Compute attention maps: `.maps` holds a tensor for each method, [images, rows, columns].

    `images`: paths, folders, PIL images, uint8 arrays [H, W, 3], or one of them; by default `count` images of the
    model's own test split. `methods`: names; "best" is the one that `measure_faithfulness` found. `target`: "auto" (the
    predicted class), a class's name or index, "all" or "top3". `sanity_checks` are made by default of up to 64 images.
    With `output` every batch is written there as soon as it is explained, in the `formats` png (or jpeg
    or webp; photos of at most `max_side` pixels, 0 for no limit), npz, html and tensorboard; `resume` continues such an
    export, and only the images that it lacks are in the result.

    Raises ValueError for an unknown method, option or class, and where no image can be read.
    """
    bundle = _load(model, device, random_weights=random_weights)
    given, trained_on = None if images is None else list(list_images(images)), bundle.config.get("data", {})
    names = replace_best((methods,) if isinstance(methods, str) else tuple(methods), bundle)
    checks = (count if given is None else len(given)) <= 64 if sanity_checks is None else sanity_checks
    running: dict[str, Any] = {"sanity_checks": checks, "batch_size": batch_size or 0, "precision": precision}
    settings = Settings(methods=names, options=options or MapOptions(), target=target, scale=scale, **running)
    settings = fit_settings(bundle, settings)
    if output is None:
        items = find_items(given, trained_on=trained_on, count=count)
        return replace(explain_items(bundle, items, settings), extra_formats=EXTRA_FORMATS)
    chosen = check_formats(formats)
    writer = MapWriter(output, bundle, settings, formats=chosen, resume=resume, max_side=max_side)
    items = find_items(given, trained_on=trained_on, count=count, done=writer.paths, taken=writer.names)
    if not resume:
        prepare_output(Path(output), overwrite=overwrite)
    return write_explanations(items, writer)


def compare(evaluations: Sequence[str | Path | EvaluationResult]) -> Comparison:
    """Compare evaluations of the same images, or the directories that they were saved in, with the first of them.

    `.pairs` hold the difference in top-1 accuracy with its 95 % interval (paired bootstrap) and McNemar's test; seeds
    of one recipe are one group. Raises ValueError for fewer than two, or of different images.
    """
    return compare_evaluations(evaluations)


def measure_faithfulness(
    model: ModelLike,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    methods: Literal["all"] | Sequence[str] = "all",
    count: int = 128,
    filled: int = 64,
    batch_size: int | None = None,
    seed: int = 0,
    device: str = "auto",
    random_weights: bool = False,
    on_start: Callable[[float], object] = lambda seconds: None,
) -> FaithfulnessResult:
    """Measure how faithful attention maps are to the model: `.summary` holds means with 95 % intervals, by metric.

    Measured are `count` images that the model predicts correctly, of the data that `vit.evaluate` would take; `seed`
    chooses them and the random maps. Filling patches with the mean is measured on `filled` of them. `on_start` is
    called with an estimate of the seconds it takes. Where all methods are measured, the best is kept beside the model
    file, for `explain(methods="best")`.

    Raises ValueError for an unknown method and fewer than 8 correct predictions.
    """
    find_methods(names := list(METHODS if methods == "all" else methods))
    bundle = _load(model, device, random_weights=random_weights)
    source = open_for_model(data, root=root, trained_on=bundle.config.get("data", {})).split(split)
    labels = map_labels(source.labels, source_classes=source.class_names, model_classes=bundle.class_names)
    batch_size = batch_size or choose_batch_size(bundle.preprocess.image_size)
    images, classes, ids = select_correct_images(bundle, source, labels, count=count, batch_size=batch_size, seed=seed)
    benchmark = Benchmark(bundle, images, classes, names, batch_size=batch_size, filled=filled, seed=seed)
    work, seconds = benchmark.plan
    on_start(seconds)
    with show_progress("faithfulness", round(work)) as benchmark.advance:
        measurement = benchmark.measure()
    device = describe_device(next(bundle.model.parameters()).device)
    inputs = {"model": bundle.name, "model_sha256": bundle.sha256, "run_id": bundle.metadata.get("run_id")}
    inputs |= {"data": source.name, "split": source.split}
    measured = {"num_images": len(ids), "seed": seed, "device": device, "precision": benchmark.precision}
    result = FaithfulnessResult(measurement, {**inputs, **measured, "versions": collect_versions()}, ids)
    if set(names) == set(METHODS) and not random_weights:
        measurement.notes.append(write_best_method(bundle, result))
    return result


def _load(model: ModelLike, device: str, *, random_weights: bool = False) -> Bundle:
    """A model in memory stays where it is unless a device is named."""
    keep_freed_memory()
    net = model.model if isinstance(model, Bundle) else model
    where = next(net.parameters()).device if device == "auto" and isinstance(net, nn.Module) else choose_device(device)
    return load_model(model, device=where, random_weights=random_weights)
