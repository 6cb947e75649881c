"""Configuration → the parts of a training run, put together."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.bundle import MODEL_FILE, save_bundle
from vit.checkpoint import CheckpointStore
from vit.config import Config, plain_values
from vit.data.loader import TrainLoader
from vit.data.open import DatasetSplits
from vit.data.sources.python_objects import FROM_PYTHON
from vit.data.statistics import compute_class_weights
from vit.data.transforms import Transform
from vit.factory.data import TrainingData, build_data, build_dataset, build_train_loader
from vit.factory.model import build_model
from vit.factory.pictures import RunPictures
from vit.factory.validation import Validator
from vit.model.model_file import read_model_file
from vit.model.presets import compute_flops
from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer
from vit.optim.schedule import schedule_factor
from vit.runtime.arguments import resolve_image_sizes
from vit.runtime.device import (
    choose_device,
    choose_precision,
    copy_to_host,
    use_deterministic_algorithms,
)
from vit.runtime.files import default_cache_dir
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import Process
from vit.training.distributed import wrap_model
from vit.training.execution import (
    choose_grad_accum_steps,
    choose_threads,
    measure_step_seconds,
    should_compile,
)
from vit.training.identity import RunIdentity
from vit.training.observers import MetricsFile, Observer, ProgressBar
from vit.training.plan import TrainingPlan
from vit.training.train_step import TrainStep
from vit.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, eq=False)
class UserObjects:
    """The objects among the arguments of `vit.train`; they are described there."""

    transform: Transform | None = None
    dataset: Any = None
    class_names: Sequence[str] | None = None
    model: nn.Module | None = None
    callbacks: Sequence[Observer] = ()

    def mark_sections(self, sections: dict[str, Any]) -> None:
        """Say in a configuration's sections what is replaced, so that its file doesn't name images
        or weights that were not used."""
        if self.dataset is not None:
            data = sections.setdefault("data", {})
            data.update(name=FROM_PYTHON, root=None, classes=None)
        if self.model is not None:
            sections.setdefault("model", {})["init"] = FROM_PYTHON

    def describe(self) -> dict[str, str | None]:
        """What tells this run from others; the images have a fingerprint of their own."""
        transform = model = None
        if self.transform is not None:
            # an object's address in memory is another one in every process
            text = re.sub(" at 0x[0-9a-f]+", "", repr(self.transform))
            transform = " ".join(text.split())
        if self.model is not None:
            model = type(self.model).__qualname__
        return {"the argument transform": transform, "the argument model": model}


@dataclass(frozen=True)
class Run:
    """A trainer with what the user is told before it starts."""

    config: Config  # with the pipeline that was chosen
    trainer: Trainer
    data: TrainingData
    model: nn.Module
    train_loader: TrainLoader
    is_compiled: bool
    # what was chosen for the images, by name, with its reason
    choices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ModelWriter:
    """Writes the model file of a run, whenever a model is the best so far.

    Args:
        directory: of the run.
        config: kept in the file, with the class names, whatever becomes of the file that they are
            from.
        data: what the model was trained on.
        process: the main one writes.
        run_id: of the run.
    """

    directory: Path
    config: Config
    data: TrainingData
    process: Process
    run_id: str

    def write(self, model: nn.Module) -> None:
        """Write a model; called in all processes."""
        weights = copy_to_host(model.state_dict())
        if not self.process.is_main:
            return
        data = self.data
        values = plain_values(self.config)
        values["data"]["class_names"] = data.splits.renamed_classes or None
        datasets = {"train": data.train}
        if data.validation is not None:
            datasets["validation"] = data.decoded_validation
        hashes = None
        if data.train.hashes is not None:
            # safetensors takes nothing else
            exact, perceptual = np.ascontiguousarray(data.train.hashes)
            hashes = (exact, perceptual)
        save_bundle(
            self.directory / MODEL_FILE,
            model,
            weights=weights,
            preprocess=data.preprocess,
            class_names=data.train.class_names,
            config=values,
            run_id=self.run_id,
            data={
                "name": data.train.name,
                "fingerprint": data.train.fingerprint,
                "splits": {
                    split: {"num_images": len(dataset), "fingerprint": dataset.fingerprint}
                    for split, dataset in datasets.items()
                },
                "unreadable": sum(len(dataset.unreadable) for dataset in datasets.values()),
                "notes": list(data.train.notes),
            },
            training_hashes=hashes,
        )

    def has_written(self) -> bool:
        """Whether the model file is there and intact. Raises ValueError for one of another run."""
        path = self.directory / MODEL_FILE
        try:
            run_id = read_model_file(path).metadata.get("run_id")
        except (OSError, ValueError):
            return False
        if run_id != self.run_id:
            raise ValueError(
                f"{path} is of run {run_id}, this is run {self.run_id}; move it away and resume"
            )
        return True


def build_run(
    config: Config,
    *,
    directory: Path,
    process: Process,
    device_name: str,
    observers: list[Observer] | None = None,
    objects: UserObjects | None = None,
    splits: DatasetSplits | None = None,
    choices: Mapping[str, str] | None = None,
) -> Run:
    """All the parts of a training run, ready to start or to resume.

    Args:
        config: of the run.
        directory: of the run.
        process: this process's place in the run.
        device_name: of this process, such as "cuda:1".
        observers: of the run; None for a progress bar, the metrics file and TensorBoard.
        objects: passed from Python.
        splits: the images, where they are open already.
        choices: what was chosen for the images, for the summary.
    """
    objects = objects or UserObjects()
    device = choose_device(device_name)
    use_deterministic_algorithms(config.train.deterministic and device.type == "cuda")
    keep_freed_memory()

    if splits is None:
        splits = build_dataset(
            config, user_dataset=objects.dataset, class_names=objects.class_names
        )
    num_classes = len(splits.split("train").class_names)
    model, pretrained = build_model(config, num_classes=num_classes, user_model=objects.model)
    data = build_data(config, splits, device=device, pretrained=pretrained)
    # a resumed run takes the same pipeline, whatever memory is free then
    config = set_pipeline(config, data.pipeline)
    # before the optimizer, whose state lies beside the weights
    model.to(device)
    train_loader = build_train_loader(
        config, data, device=device, process=process, transform=objects.transform
    )

    plan = build_plan(
        config, model, steps_per_epoch=len(train_loader), batch_size=train_loader.batch_size
    )
    class_weights = None
    if data.class_balance == "weights":
        weights = compute_class_weights(data.train.labels, num_classes)
        class_weights = torch.from_numpy(weights).to(device)
    is_compiled = _choose_compile(config, model, plan, device)
    train_step = build_train_step(
        config,
        model,
        plan=plan,
        process=process,
        device=device,
        class_weights=class_weights,
        compile=is_compiled,
    )

    # measured with the numbers that `vit evaluate` would report
    run_observers: list[Observer] = []
    validator = None
    if data.validation is not None:
        validator = Validator(data, device, train_step.precision, run_observers)
    if observers is not None:
        run_observers += observers
    elif process.is_main:
        tensorboard = RunPictures(
            directory, data, train_loader, validator, config.train.attention_maps
        )
        run_observers += [ProgressBar(), MetricsFile(directory), tensorboard, *objects.callbacks]

    # checkpoints and the model file say of which run they are
    identity = RunIdentity.from_config(
        config, objects.describe(), data_fingerprint=data.train.fingerprint
    )
    model_writer = ModelWriter(directory, config, data, process, identity.run_id)
    trainer = Trainer(
        train_step=train_step,
        plan=plan,
        train_batches=train_loader,
        evaluate=validator,
        checkpoints=CheckpointStore(directory / "checkpoints"),
        save_model=model_writer.write,
        has_model=model_writer.has_written,
        observers=run_observers,
        process=process,
        identity=identity,
        sample_name=lambda index: str(data.train.ids[index]),
    )
    return Run(config, trainer, data, model, train_loader, is_compiled, choices or {})


def build_plan(
    config: Config, model: nn.Module, *, steps_per_epoch: int, batch_size: int
) -> TrainingPlan:
    """How long a run is, and what happens when.

    Args:
        config: the configuration.
        model: to be trained; image sizes are multiples of its patches.
        steps_per_epoch: batches of an epoch.
        batch_size: images of a step, over all processes.
    """
    train = config.train
    patch_size = (1, 1)
    if isinstance(model, VisionTransformer):
        patch_size = model.patch_embed.patch_size
    return TrainingPlan(
        epochs=train.epochs,
        steps_per_epoch=steps_per_epoch,
        total_steps=min(train.epochs * steps_per_epoch, train.max_steps or sys.maxsize),
        seed=train.seed,
        batch_size=batch_size,
        evaluate_every_epochs=train.evaluate_every_epochs,
        checkpoint_every_steps=train.checkpoint_every_steps,
        image_sizes=resolve_image_sizes(
            train.image_sizes, image_size=config.data.image_size, patch_size=patch_size
        ),
        patch_drop_rates=tuple(train.patch_drop_rates or ()),
        mix_until=config.augment.mix_until,
        on_nonfinite=train.on_nonfinite,
        select_by=train.select_by,
        early_stopping_patience=train.early_stopping_patience,
        timeout_seconds=train.timeout_seconds,
    )


def build_train_step(
    config: Config,
    model: nn.Module,
    *,
    plan: TrainingPlan,
    process: Process,
    device: torch.device,
    class_weights: Float[Tensor, " C"] | None = None,
    compile: bool = False,
) -> TrainStep:
    """The step that trains a model: the model in its processes, its weights' average, optimizer and
    schedule.

    Args:
        config: the configuration.
        model: to be trained.
        plan: of the run.
        process: this process's place in the run.
        device: of this process.
        class_weights: of the loss; None for equal ones.
        compile: whether torch compiles the forward pass.
    """
    train = config.train
    precision = choose_precision(train.precision, device)
    parallel_model = wrap_model(model, process=process, device=device)
    optimizer = create_optimizer(
        config.optimizer.name,
        model,
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        betas=config.optimizer.betas,
        layer_decay=config.optimizer.layer_decay,
        muon_lr=config.optimizer.muon_lr,
        muon_dtype=getattr(torch, precision),
    )
    # a run of few steps ends before a warm-up of whole epochs would
    warmup_steps = round(config.schedule.warmup_epochs * plan.steps_per_epoch)
    lr_factor = partial(
        schedule_factor,
        name=config.schedule.name,
        warmup_steps=min(warmup_steps, plan.total_steps - 1),
        total_steps=plan.total_steps,
    )
    grad_accum_steps = train.grad_accum_steps
    if grad_accum_steps == "auto":
        grad_accum_steps = choose_grad_accum_steps(
            model,
            batch_size=plan.batch_size // process.world_size,
            image_size=config.data.size,
            device=device,
        )
    # several processes share the cores already, and compiled code keeps Python's lock
    threads = None
    if process.world_size == 1 and not compile:
        threads = choose_threads(model, device=device)
    return TrainStep(
        parallel_model,
        optimizer,
        lr_factor,
        precision=precision,
        label_smoothing=train.label_smoothing,
        class_weights=class_weights,
        clip_grad=train.clip_grad,
        grad_accum_steps=grad_accum_steps,
        ema_decay=train.ema_decay,
        halt_on_nonfinite=train.on_nonfinite == "stop",
        compile=compile,
        threads=threads,
    )


def estimate_seconds(
    train_step: TrainStep, plan: TrainingPlan, *, image_size: tuple[int, int], process: Process
) -> float:
    """Seconds that the steps of a run take, from a few of them, which train.

    Args:
        train_step: of the run.
        plan: of the run.
        image_size: (height, width) of its data.
        process: this process's place in the run.
    """
    batch_size = plan.batch_size // process.world_size
    step_seconds = measure_step_seconds(train_step, batch_size=batch_size, image_size=image_size)
    # large images and all patches cost more than the small ones that a run may begin with
    return step_seconds * plan.count_full_steps(image_size)


def _choose_compile(
    config: Config, model: nn.Module, plan: TrainingPlan, device: torch.device
) -> bool:
    """Whether the step is compiled; other models than ours only where the configuration says so."""
    compiles = config.train.compile
    if compiles == "auto":
        # threads that divide the batch gain more than compiled code does, which they can't run side
        # by side
        is_divided = choose_threads(model, device=device) is not None
        compiles = False
        if isinstance(model, VisionTransformer) and not is_divided:
            # the backward pass costs twice the forward
            step_flops = 3 * compute_flops(model.architecture) * plan.batch_size
            compiles = should_compile(
                device.type,
                total_flops=step_flops * plan.total_steps,
                num_sizes=len(plan.image_sizes) or 1,
            )
    if compiles:
        # torch's own choice is the folder for temporary files, which is emptied now and then
        directory = (config.data.cache_dir or default_cache_dir()) / "compiled"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory))
    return compiles


def set_pipeline(config: Config, pipeline: Literal["resident", "workers"]) -> Config:
    """The configuration with the `data.pipeline` that was chosen, so that a resumed run takes the
    same."""
    data = config.data.model_copy(update={"pipeline": pipeline})
    return config.model_copy(update={"data": data})
