"""Configuration → the parts of a training run, put together."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.config import Config
from vit.data.loader import TrainLoader
from vit.data.splits import DatasetSplits
from vit.data.statistics import compute_class_weights
from vit.model.presets import compute_flops
from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer
from vit.optim.schedule import schedule_factor
from vit.runtime.arguments import resolve_image_sizes
from vit.runtime.background_writer import BackgroundWriter
from vit.runtime.device import choose_device, choose_precision, use_deterministic_algorithms
from vit.runtime.files import default_cache_dir
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import Process
from vit.training.checkpoint import CheckpointStore
from vit.training.data import TrainingData, build_data, build_dataset, build_train_loader
from vit.training.distributed import wrap_model
from vit.training.execution import (
    choose_grad_accum_steps,
    choose_threads,
    should_compile,
)
from vit.training.identity import RunIdentity
from vit.training.model import build_model
from vit.training.model_writer import BundleWriter
from vit.training.observers import MetricsFile, Observer, ProgressBar
from vit.training.pictures import TensorBoardWithPictures
from vit.training.plan import TrainingPlan
from vit.training.probe import (
    FittedProbe,
    build_probed_model,
    fit_to_data,
    is_probe_alone,
    load_probed_model,
    uses_probe,
)
from vit.training.tokens import keep_tokens
from vit.training.train_step import TrainStep
from vit.training.trainer import Trainer
from vit.training.user_objects import UserObjects
from vit.training.validation import HeldAside, ImageValidator


@dataclass(frozen=True)
class Run:
    """The parts of a training run that are needed once it is built."""

    config: Config  # with the pipeline that was chosen
    data: TrainingData
    trainer: Trainer
    # of the pictures that the training batches show, or the tokens in them stand for
    image_loader: TrainLoader
    # None without validation images
    held_aside: HeldAside | None
    # that the model starts from, where it was fitted for this run now
    probe: FittedProbe | None = None


def build_run(
    config: Config,
    *,
    directory: Path,
    process: Process,
    device_name: str,
    observers: Sequence[Observer] | None = None,
    objects: UserObjects | None = None,
    splits: DatasetSplits | None = None,
    probe: FittedProbe | None = None,
    resume: bool = False,
) -> Run:
    """All the parts of a training run, ready to start or to resume.

    Args:
        config: of the run.
        directory: of the run.
        process: this process's place in the run.
        device_name: of this process, such as "cuda:1".
        observers: of the run; None for a progress bar, the metrics file, TensorBoard and those that
            were passed from Python.
        objects: passed from Python.
        splits: the images, where they are open already.
        probe: that the model starts from, where it was fitted already.
        resume: the model may be one that the run has left.
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
    # before the optimizer, whose state lies beside the weights
    model.to(device)
    if uses_probe(config) and isinstance(model, VisionTransformer):
        probed_model = load_probed_model(config, directory) if resume else None
        if probed_model is None:
            probe = probe or fit_to_data(config, model, data, device=device)
            probed_model = build_probed_model(config, model, probe.probe)
        model = probed_model.to(device)
    data, tokens = keep_tokens(config, model, data, device=device, transform=objects.transform)
    # a resumed run takes the same pipeline, whatever memory is free then
    config = data.config
    build_loader = partial(
        build_train_loader, data, device=device, process=process, transform=objects.transform
    )
    image_loader = build_loader()
    train_loader = image_loader
    if tokens is not None:
        train_loader = build_loader(tokens=tokens)

    plan = build_plan(
        config, model, steps_per_epoch=len(train_loader), batch_size=train_loader.batch_size
    )
    class_weights = None
    if data.class_balance == "weights":
        weights = compute_class_weights(data.train.labels, num_classes)
        class_weights = torch.from_numpy(weights).to(device)
    train_step = build_train_step(
        config,
        model,
        plan=plan,
        process=process,
        device=device,
        class_weights=class_weights,
        compile=_choose_compile(config, model, plan, device),
    )

    validator = None
    held_aside = None
    if data.validation is not None:
        held_aside = HeldAside(config.train.select_by)
        validator = ImageValidator(data, device, held_aside)
    writer = BackgroundWriter()
    if observers is None:
        tensorboard = TensorBoardWithPictures(directory, image_loader, validator)
        metrics_file = MetricsFile(directory, writer)
        observers = [ProgressBar(), metrics_file, tensorboard, *objects.callbacks]

    # checkpoints and the model file say of which run they are
    identity = RunIdentity.from_config(
        config,
        objects.describe(),
        data_fingerprint=data.train.fingerprint,
        conditions={
            "the kind of device": device.type,
            "the precision": train_step.precision,
            "torch's version": str(torch.__version__),
        },
    )
    trainer = Trainer(
        train_step=train_step,
        plan=plan,
        train_batches=train_loader,
        validator=validator,
        checkpoints=CheckpointStore(directory / "checkpoints"),
        model_writer=BundleWriter(directory, data, process, identity.run_id, writer),
        observers=list(observers) if process.is_main else [],
        process=process,
        identity=identity,
        writer=writer,
        keeps_first_model=uses_probe(config),
    )
    return Run(config, data, trainer, image_loader, held_aside, probe)


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
    total_steps = min(train.epochs * steps_per_epoch, train.max_steps or sys.maxsize)
    if is_probe_alone(config):
        total_steps = 0
    patch_size = (1, 1)
    if isinstance(model, VisionTransformer):
        patch_size = model.patch_embed.patch_size
    return TrainingPlan(
        epochs=train.epochs,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
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
        max_seconds=None if train.max_minutes is None else 60 * train.max_minutes,
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
        warmup_steps=min(warmup_steps, max(plan.total_steps - 1, 0)),
        total_steps=plan.total_steps,
    )
    if train.grad_accum_steps != "auto":
        grad_accum_steps = train.grad_accum_steps
    else:
        grad_accum_steps = choose_grad_accum_steps(
            model,
            batch_size=plan.batch_size // process.world_size,
            image_size=config.data.size,
            device=device,
            precision=precision,
        )
        # the free memory of several GPUs differs
        grad_accum_steps = process.broadcast(grad_accum_steps)
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
