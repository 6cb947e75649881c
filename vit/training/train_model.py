"""`vit.train`: a training run from its configuration, or images alone, to its end."""

import copy
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from torch import nn

from vit.config import Config, list_overrides, load_config, values_to_save
from vit.data.sources.folders import check_not_inside
from vit.data.sources.python_objects import FROM_PYTHON
from vit.data.workers import Transform
from vit.evaluation.predictions import PREDICTIONS_FILE
from vit.model.find_file import find_initial_weights
from vit.runtime.arguments import check_kind, check_minimum
from vit.runtime.console import echo
from vit.runtime.files import expand_home, format_json, remove, write_atomically
from vit.runtime.processes import join_processes
from vit.training.automatic import choose_config
from vit.training.cross_validation import FOLDS_KEYS, cross_validate
from vit.training.data import build_dataset, build_train_loader
from vit.training.losses import Loss
from vit.training.model_answers import complete_model_file
from vit.training.observers import Observer
from vit.training.print_plan import print_plan
from vit.training.probe import PROBE_KEYS
from vit.training.recipe import ConfigLike, find_recipe, names_images
from vit.training.result import TrainingResult
from vit.training.run import Run, build_run
from vit.training.run_directory import (
    CONFIG_FILE,
    CURVE_FILE,
    FIRST_BATCH_FILE,
    FOLDS,
    clear_run_directory,
    open_run_directory,
)

# images of the first batch that --dry-run shows
_BATCH_IMAGES = 64


def train(
    config: ConfigLike | None = None,
    *,
    output: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    init: str | Path | None = None,
    minutes: float | None = None,
    group_by: str | int | None = None,
    label_by: str | None = None,
    path_column: str | None = None,
    label_column: str | None = None,
    split_column: str | None = None,
    group_column: str | None = None,
    folds: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    show_plan: bool = False,
    transform: Transform | None = None,
    dataset: Any = None,
    class_names: Sequence[str] | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    callbacks: Sequence[Observer] = (),
) -> TrainingResult:
    """Train a model and keep the run in a directory.

    Args:
        config: A YAML file, the name of a packaged recipe ("cifar10/cpu"), a
            dictionary of sections or a `vit.config.Config`. Or images: a
            folder, table, shards or the name of a data set, for which a
            configuration is chosen. None with `resume`: the run's own.
        output: Directory of the run.
        overrides: Changes of the configuration, such as ["train.epochs=20"] or
            {"train.epochs": 20}; vit/config.py lists the keys.
        init: Weights to start from: "timm:NAME", a folder of timm or Hugging
            Face, a file of weights, a model file or a run; "none" for random
            weights. None: those of `model.init`, or for photos a ViT-S/14 of
            DINOv2.
        minutes: Minutes of training. None: where `config` names images, 5 on a
            CPU and 20 on a GPU.
        group_by: Groups that stay in one split (an animal, a site): 1 for
            images of one folder, 2 for the folder above it, or a regular
            expression with one group, such as (site[0-9]+). None: the column
            "group" of a table.
        label_by: Regular expression whose one group, in an image's path, is the
            class: ([a-z]+)[.] for cat.0.jpg. None: folders or a table name it.
        path_column: Column of a table that names the images. None: recognised.
        label_column: Column of a table that names the classes. None:
            recognised.
        split_column: Column of a table that names the splits. None: the column
            "split".
        group_column: Column of a table that names the groups. None: the column
            "group".
        folds: Train on all images, and once more without each of this number
            of folds. Each image is predicted by a model that has seen neither
            it nor its group; `vit evaluate` reports on the predictions. With
            `init` the models are linear probes, unless `overrides` has
            model.freeze. None: images are held out.
        resume: Continue the run in `output` from its last checkpoint, if there
            is one. Pass `transform`, `dataset`, `model`, `loss` and
            `callbacks` again. With more train.epochs, train.max_steps or
            `minutes` than a run had that has ended, it is trained longer, at
            the learning rates that a run of this length has from there on.
        overwrite: Replace the run in `output`.
        dry_run: Write a picture of one batch, `first_batch.png`, and stop.
        show_plan: Print what the run will do, and what may go wrong.
        transform: Function called on each training image, uint8 [H, W, 3],
            before the augmentation of the configuration: a transform of
            albumentations or torchvision, or any function.
        dataset: Images instead of those of the configuration: a data set of
            torch or Hugging Face, a list of items, a pair (images, labels
            [n]), or a dictionary {"train": …, "validation": …} of those. An
            item is (image, label) or a dictionary with the keys image (img)
            and label (labels). An image is a PIL image, or an array or tensor
            [H, W, 3], [3, H, W] or [H, W], of uint8 or of values from 0 to 1;
            arrays may have more bits. A label is a whole number, a class name,
            or, for several labels, a list of names.
        class_names: Class names of `dataset`, in the order of the labels.
            None: its attribute `classes` or its features, the labels where
            they are names, or "class 0" and so on.
        model: A module from images [B, 3, H, W] to logits [B, C], which is
            trained itself. None: a vision transformer as configured.
        loss: Function that takes the place of the cross-entropy, its label
            smoothing and class weights, from logits [B, C] and targets to the
            losses [B] or their mean. The targets are classes [B], or with
            mixup and cutmix class probabilities [B, C]. Validation measures
            cross-entropy.
        callbacks: Objects of `vit.Observer`, whose methods are called after
            each step and epoch. One that returns True saves the state and ends
            the run.

    Returns:
        The run: `.bundle` is its best model, `.metrics` has a dictionary for
        each epoch.

    Raises:
        ValueError: A wrong configuration, or arguments that don't fit together.
        FileExistsError: `output` holds another run.
        vit.training.signals.TrainingInterrupted: SIGINT or SIGTERM arrived; the
            state is saved.
        vit.runtime.processes.ProcessLostError: Another process of the job has
            ended or hangs.

    Example:
        >>> run = vit.train("photos", output="runs/photos", minutes=5)
        >>> vit.predict(run.bundle, "photo.jpg").predictions[0].classes
    """
    started_at = time.perf_counter()
    _check_types(config, overrides, model, callbacks)
    check_minimum(0.01, minutes=minutes)
    check_minimum(2, folds=folds)
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give one of them")
    if isinstance(group_by, str) and group_by.isdecimal():
        group_by = int(group_by)
    directory = expand_home(output)
    # These arguments stand for keys of the configuration.
    keys: dict[str, Any] = {
        "data.group_by": group_by,
        "data.label_by": label_by,
        "data.path_column": path_column,
        "data.label_column": label_column,
        "data.split_column": split_column,
        "data.group_column": group_column,
        "train.max_minutes": minutes,
    }
    keys = {key: value for key, value in keys.items() if value is not None}
    if init is not None:
        keys["model.init"] = None if init == "none" else find_initial_weights(init, directory)
    if loss is not None:
        keys |= {"train.label_smoothing": 0, "train.class_balance": "none"}
    if folds is not None:
        keys |= FOLDS_KEYS
        if keys.get("model.init"):
            keys |= PROBE_KEYS
    all_overrides = keys | list_overrides(overrides)
    # The file of the configuration must not name images or weights that are not used.
    if dataset is not None:
        all_overrides |= {"data.name": FROM_PYTHON, "data.root": None, "data.classes": None}
    if model is not None:
        all_overrides["model.init"] = FROM_PYTHON
    resolved = _resolve_config(config, directory, all_overrides, resume=resume)
    is_chosen = resolved is None
    device = str(all_overrides.get("train.device", "auto"))
    if resolved is not None:
        device = resolved.train.device
    # A dry run leaves a run that is there alone.
    resume = resume and not dry_run
    with ExitStack() as stack:
        process, device_name = stack.enter_context(join_processes(device))
        if process.is_main and not dry_run:
            stack.enter_context(open_run_directory(directory, resume=resume, overwrite=overwrite))
        reasons: dict[str, str] = {}
        splits = None
        if is_chosen and process.is_main:
            assert isinstance(config, str | Path)
            resolved, reasons, splits = choose_config(config, all_overrides)
        resolved = process.broadcast(resolved)
        assert resolved is not None
        if dataset is not None:
            splits = build_dataset(resolved, user_dataset=dataset, class_names=class_names)
        # each fold begins with its weights
        initial_model = copy.deepcopy(model) if folds is not None else None
        build = partial(build_run, device_name=device_name, transform=transform, loss=loss)
        run = build(resolved, directory=directory, splits=splits, user_model=model)
        trainer = run.trainer
        if is_chosen:
            # The minutes are for the choice, the images and the probe, too.
            trainer.seconds_before = time.perf_counter() - started_at
        if process.is_main:
            trainer.observers += callbacks
        is_resumed = resume and trainer.resume()
        if process.is_main and not dry_run:
            if not is_resumed:
                clear_run_directory(directory, overwrite=overwrite)
            if run.probe is not None and run.probe.curve is not None:
                write_atomically(directory / CURVE_FILE, format_json(run.probe.curve))
            saved = yaml.safe_dump(values_to_save(run.data.config), sort_keys=False)
            write_atomically(directory / CONFIG_FILE, saved)
        if show_plan and process.is_main:
            print_plan(run, reasons, resumed=is_resumed)
        if dry_run:
            if process.is_main:
                _save_first_batch(run, directory / FIRST_BATCH_FILE, transform=transform)
            return TrainingResult(directory, steps=0, seconds=0.0, best_top1=None)

        is_measured = trainer.is_done() and (directory / PREDICTIONS_FILE).exists()
        if folds is not None and not is_measured:
            sentence = cross_validate(
                run,
                build,
                module=initial_model,
                num_folds=folds,
                directory=directory,
                resume=resume,
            )
            if show_plan and process.is_main:
                echo(sentence, err=True)
        progress = trainer.train()
        complete_model_file(run, directory)
        if process.is_main and trainer.is_done():
            remove(directory / FOLDS)

    return TrainingResult(
        directory,
        steps=progress.step,
        seconds=progress.elapsed_seconds,
        best_top1=progress.best.get("top1"),
        best_map=progress.best.get("map"),
        num_validation=len(run.data.validation or ()),
        module=model,
        passed_images=run.data.splits if dataset is not None else None,
    )


def _check_types(
    config: object, overrides: object, model: object, callbacks: Sequence[object]
) -> None:
    """Raise ValueError for an argument of `train` of another type, and in a worker process that has
    run the script of its main process."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(
            "a worker process has run this script again; call vit.train under"
            " if __name__ == '__main__': in it"
        )
    passing = "a recipe, YAML file, photos or sections; pass images from Python as dataset=…"
    check_kind(config, (str, Path, Mapping, Config, NoneType), name="config", expected=passing)
    texts = 'a list of texts, such as ["train.epochs=20"], or a dictionary'
    check_kind(overrides, (list, tuple, Mapping), name="overrides", expected=texts)
    check_kind(model, (nn.Module, NoneType), name="model", expected="an object of an nn.Module")
    for callback in callbacks:
        expected = "an object of a subclass of vit.Observer"
        check_kind(callback, Observer, name="a callback", expected=expected)


def _save_first_batch(run: Run, path: Path, *, transform: Transform | None) -> None:
    """Write the first training images as the model gets them, augmented, as one picture."""
    # a second to import
    from torchvision.utils import save_image

    device = run.trainer.train_step.device
    loader = build_train_loader(run.data, device=device, transform=transform)
    with closing(loader):
        images = next(loader.epoch(0)).images[:_BATCH_IMAGES].float().cpu()
    scale, shift = loader.preprocess.scale_and_shift()
    images = ((images - shift) / (255 * scale)).clamp(0, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: save_image(images, file, format="png", nrow=8))


def _resolve_config(
    source: ConfigLike | None, directory: Path, overrides: dict[str, Any], *, resume: bool
) -> Config | None:
    """Find the configuration of a run in `directory`. None for images, for which one is to be
    chosen."""
    saved = directory / CONFIG_FILE
    continues = resume and saved.exists()
    is_images = names_images(source)
    if continues and (is_images or source is None):
        source = saved
    elif is_images:
        assert isinstance(source, str | Path)
        if FROM_PYTHON in (overrides.get("data.name"), overrides.get("model.init")):
            raise ValueError(
                "a configuration is chosen for images and models that are named; name a recipe to"
                " pass them from Python"
            )
        check_not_inside(directory, expand_home(source))
        return None
    elif source is None:
        usage = "vit train PHOTOS or CONFIG [key.path=value …] --output DIR"
        raise ValueError(f"which configuration? {usage}")
    elif isinstance(source, Config):
        source = source.model_dump(exclude_unset=True)
    elif not isinstance(source, Mapping):
        source = find_recipe(source)
    config = load_config(source, overrides)
    # The pipeline that was chosen at the start holds, whatever memory is free now.
    if continues and config.data.pipeline == "auto":
        config = config.with_data(pipeline=load_config(saved).data.pipeline)
    # In its folder of images, the directory would spoil the images for each later run.
    if config.data.name == "folder" and config.data.root is not None:
        check_not_inside(directory, expand_home(config.data.root))
    return config
