"""What a program calls: `vit.train(…)`, `vit.evaluate(…)` and so on. The commands call the same functions."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

import vit
from vit.build.run import Run, build_run, find_changes
from vit.build.summary import draw_batch
from vit.bundle import MODEL_FILE, Bundle, collect_versions, load_bundle
from vit.config import Config, dump_config, load_config, plain_values
from vit.data.open import open_for_model
from vit.evaluation.images import map_labels
from vit.explanation.faithfulness.benchmark import Plan, measure
from vit.explanation.faithfulness.selection import select_correct_images
from vit.explanation.faithfulness.summary import FaithfulnessResult
from vit.explanation.methods.table import METHODS, find_methods
from vit.runtime.device import choose_device, describe_device
from vit.runtime.files import write_text
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import join_processes
from vit.runtime.progress import show_progress
from vit.training.run_directory import CONFIG_FILE, METRICS_FILE, load_metrics, open_run_directory

ModelLike = str | Path | Bundle | nn.Module
ConfigLike = str | Path | Mapping[str, Any] | Config


@dataclass(frozen=True)
class TrainingResult:
    """A finished training run and the directory that holds it."""

    directory: Path
    config: Config
    steps: int
    seconds: float  # of training, over all resumptions
    best_top1: float | None  # 0 to 1, on the validation images; None without any

    @property
    def model_path(self) -> Path:
        """The model file: the weights with the best validation top-1."""
        return self.directory / MODEL_FILE

    @cached_property
    def bundle(self) -> Bundle:
        """The best model, on the CPU."""
        return load_bundle(self.model_path)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary an epoch: its losses, accuracies, learning rate and speed."""
        return load_metrics(self.directory / METRICS_FILE)

    def save(self, directory: str | Path) -> None:
        """Copy the whole run, with its checkpoints, to `directory`."""
        shutil.copytree(self.directory, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".lock"))


def train(
    config: ConfigLike | None = None,
    *,
    output: str | Path,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_start: Callable[[Run, bool], object] = lambda run, resumed: None,
) -> TrainingResult:
    """Train a model and keep the run in the directory `output`.

    `config` is a YAML file, the name of a packaged recipe ("cifar10/cpu"), a dictionary of sections or a `Config`; with
    `resume` it may be left out. `overrides` such as "train.epochs=20" are applied to it. `resume` continues the run in
    `output` from its last checkpoint, `overwrite` replaces it. `on_start` is called in the main process with the run
    that is about to start, and whether it was resumed; with `dry_run` that and the picture of a batch are all.

    Raises ValueError for a wrong configuration, FileExistsError where `output` holds another run, and
    `vit.training.signals.Stopped` after SIGINT or SIGTERM, with the state saved.
    """
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give one of them")
    output = Path(output)
    resolved = _resolve_config(config, overrides, output, resume=resume)
    with join_processes(resolved.train.device) as (process, device_name):
        arguments: dict[str, Any] = {"directory": output, "process": process, "device_name": device_name}
        if dry_run:
            output.mkdir(parents=True, exist_ok=True)
            run = build_run(resolved, **arguments)
            on_start(run, False)
            draw_batch(run, output / "dry_run.png")
            return TrainingResult(output, resolved, steps=0, seconds=0.0, best_top1=None)
        with open_run_directory(output, resume=resume, overwrite=overwrite, is_main=process.is_main):
            run = build_run(resolved, **arguments)
            resumed = resume and run.trainer.resume()
            if process.is_main:
                if not (output / CONFIG_FILE).exists():
                    write_text(output / CONFIG_FILE, dump_config(resolved))
                on_start(run, resumed)
            progress = run.trainer.run()
    best_top1 = None if run.data.validation is None else progress.best_top1
    return TrainingResult(output, resolved, progress.step, progress.elapsed_seconds, best_top1)


def find_recipe(name: str | Path) -> Path:
    """The configuration file `name`, or the packaged recipe of that name. Raises FileNotFoundError with their names."""
    path = Path(name)
    packaged = Path(vit.__file__).parent / "configs"
    folder = packaged if packaged.is_dir() else packaged.parents[1] / "configs"  # of a checkout
    if path.is_file() or path.suffix in (".yaml", ".yml") or not folder.is_dir():
        return path
    if not (recipe := folder / f"{name}.yaml").is_file():
        known = sorted(str(found.relative_to(folder).with_suffix("")) for found in folder.rglob("*.yaml"))
        raise FileNotFoundError(f"configuration {name} does not exist; packaged recipes: {', '.join(known)}")
    return recipe


def _resolve_config(
    config: ConfigLike | None, overrides: Sequence[str], output: Path, *, resume: bool
) -> Config:
    """The configuration of the run; of the one in `output` where that is to be continued."""
    saved = output / CONFIG_FILE
    continues = resume and saved.exists()
    if config is None:
        if not continues:
            raise ValueError("which configuration? vit train CONFIG.yaml [key.path=value …] --output DIR")
        config = saved
    if isinstance(config, Config):
        config = plain_values(config)
    source = find_recipe(config) if isinstance(config, str | Path) else config
    resolved = load_config(source, overrides)
    if continues and (changed := find_changes(resolved, saved)):
        raise ValueError(
            f"--resume continues the run of {saved}, but {', '.join(changed)} differ; resume without them or start "
            "another run"
        )
    return resolved


def measure_faithfulness(
    model: ModelLike,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    methods: Literal["all"] | Sequence[str] = "all",
    count: int = 256,
    batch_size: int = 32,
    seed: int = 0,
    device: str = "auto",
    random_weights: bool = False,
) -> FaithfulnessResult:
    """Measure how faithful attention maps are to the model: `.summary` holds means with 95 % intervals, by metric.

    Measured are `count` images that the model predicts correctly, of the data that `vit.evaluate` would take; `seed`
    chooses them and the random maps. Raises ValueError for an unknown method and fewer than 8 correct predictions.
    """
    names = list(METHODS) if methods == "all" else list(methods)
    find_methods(names)
    bundle = _load(model, device, random_weights=random_weights)
    source = open_for_model(data, root=root, trained_on=bundle.config.get("data", {})).split(split)
    labels = map_labels(source.labels, source_classes=source.class_names, model_classes=bundle.class_names)
    images, classes, ids = select_correct_images(
        bundle, source, labels, count=count, batch_size=batch_size, seed=seed
    )
    where = next(bundle.model.parameters()).device
    with show_progress("faithfulness", None) as advance:
        measurement = measure(
            bundle.model,
            images.to(where),
            classes.to(where),
            Plan(methods=tuple(names), batch_size=batch_size, seed=seed),
            pixel_std=bundle.preprocess.std,
            on_progress=lambda what: advance(1),
        )
    conditions = {
        "model": bundle.name,
        "model_sha256": bundle.sha256,
        "data": source.name,
        "split": source.split,
        "num_images": len(ids),
        "seed": seed,
        "device": describe_device(where),
        "versions": collect_versions(),
    }
    return FaithfulnessResult(measurement, conditions, ids)


def _load(model: ModelLike, device: str, *, random_weights: bool = False) -> Bundle:
    keep_freed_memory()
    assert isinstance(model, str | Path)
    return load_bundle(model, device=choose_device(device), random_weights=random_weights)
