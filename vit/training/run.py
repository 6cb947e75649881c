"""Configuration → the parts of a training run, put together. Nothing else builds a run."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vit.config import Config
from vit.data.splits import DatasetSplits
from vit.data.statistics import compute_class_weights
from vit.data.workers import Transform
from vit.model.logits import count_features
from vit.model.model_info import find_image_size
from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer, schedule_factor
from vit.runtime.device import choose_device, choose_precision, use_deterministic_algorithms
from vit.runtime.files import default_cache_dir
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import current_process
from vit.runtime.threads import BatchThreads
from vit.training.data import TrainingData, build_data, build_dataset, build_train_loader
from vit.training.identity import identify_run
from vit.training.losses import Loss, StepLoss, build_loss
from vit.training.model import build_model, check_model
from vit.training.observers import Observer, ProgressBar, TensorBoard
from vit.training.plan import TrainingPlan, resolve_image_sizes
from vit.training.probe import (
    FittedProbe,
    build_probed_model,
    fit_to_data,
    is_probe_alone,
    uses_probe,
)
from vit.training.tokens import keep_tokens
from vit.training.train_step import TrainStep
from vit.training.trainer import Trainer

# Images of each size in a run on a GPU from which compiling its blocks is worth a minute: 1.6e16
# FLOPs of a ViT-S/16 at 224 px.
_WORTHWHILE_IMAGES = 600_000
# Forms of a block that are compiled: each image size and rate of dropped patches is one. Beyond
# torch's limit of 8 the rest would not be, without a word.
_MAX_COMPILED = 64
# Bytes of a part's widest activation for each thread of a CPU: a core's own cache and its share of
# the common one. Where memory bounds the time of a step, parts of this size are 1.1 × faster than
# the whole batch at once, with half its memory.
_CACHE_BYTES = 3 * 2**20
_BYTES_PER_VALUE = 2  # bfloat16


@dataclass(frozen=True)
class Run:
    """The parts of a training run that are needed once it is built."""

    # with the image size and the pipeline that were chosen, which a resumed run takes again
    data: TrainingData
    trainer: Trainer
    probe: FittedProbe | None


def build_run(
    config: Config,
    *,
    directory: Path,
    device_name: str,
    splits: DatasetSplits | None = None,
    transform: Transform | None = None,
    user_model: nn.Module | None = None,
    loss: Loss | None = None,
) -> Run:
    """Build a training run, ready to start or to resume.

    Args:
        directory: Directory of the run.
        device_name: Device of this process, such as "cuda:1".
        splits: The images, where they are open already.
        transform, user_model, loss: Objects from Python. See `vit.train`.
    """
    if loss is not None and is_probe_alone(config):
        raise ValueError(
            "loss is for training steps, and this run is a linear probe alone; set model.freeze=none"
        )
    device = choose_device(device_name)
    use_deterministic_algorithms(config.train.deterministic and device.type == "cuda")
    keep_freed_memory()

    splits = splits or build_dataset(config)
    class_names = splits.split("train").class_names
    num_classes = len(class_names)
    pretrained = None
    if user_model is not None:
        model = user_model
    else:
        model, pretrained = build_model(config, class_names=class_names)
        if config.data.image_size is None:
            size = pretrained.image_size if pretrained else find_image_size(model)
            assert size is not None, "models of vit and timm have one"
            config = config.with_data(image_size=size[0] if size[0] == size[1] else size)
    check_model(config, model, num_classes=num_classes)
    # The model moves first, because the optimizer creates its state on the device of the weights.
    model.to(device)
    data = build_data(
        config, splits, device=device, pretrained=pretrained, has_transform=transform is not None
    )
    probe = None
    # the features of other libraries' modules are unknown
    if uses_probe(config) and count_features(model):
        probe = fit_to_data(config, model, data, device=device)
        model = build_probed_model(config, model, probe.probe).to(device)
    data, tokens = keep_tokens(config, model, data, device=device, transform=transform)
    config = data.config
    batches = build_train_loader(data, device=device, transform=transform, tokens=tokens)

    is_multilabel = data.train.is_multilabel
    plan = build_plan(
        config,
        model,
        steps_per_epoch=len(batches),
        batch_size=batches.batch_size,
        multilabel=is_multilabel,
    )
    class_weights = None
    if data.class_balance == "weights":
        weights = compute_class_weights(data.train.labels, num_classes)
        class_weights = torch.from_numpy(weights).to(device)
    if isinstance(loss, nn.Module):
        loss.to(device)
    step_loss = build_loss(
        multilabel=is_multilabel,
        label_smoothing=config.train.label_smoothing,
        class_weights=class_weights,
        user_loss=loss,
    )
    train_step = build_train_step(
        config, model, plan=plan, device=device, loss=step_loss, is_capturable=loss is None
    )
    passed = {"transform": transform, "model": user_model, "loss": loss}
    identity = identify_run(config, data.train.fingerprint, passed)
    observers: list[Observer] = []
    if current_process().is_main:
        observers += [ProgressBar(len(data.validation or ())), TensorBoard(directory)]
    trainer = Trainer(
        train_step=train_step,
        plan=plan,
        train_batches=batches,
        data=data,
        directory=directory,
        observers=observers,
        identity=identity,
    )
    return Run(data, trainer, probe)


def build_plan(
    config: Config,
    model: nn.Module,
    *,
    steps_per_epoch: int,
    batch_size: int,
    multilabel: bool = False,
) -> TrainingPlan:
    """Plan how long a run is, and what happens when. Raises ValueError if `train.select_by` is a
    measure of several labels alone."""
    train = config.train
    if multilabel and train.select_by == "top1":
        train = train.model_copy(update={"select_by": "map"})
    if not multilabel and train.select_by == "map":
        raise ValueError("train.select_by=map is for several labels an image; take macro_f1")
    total_steps = min(train.epochs * steps_per_epoch, train.max_steps or sys.maxsize)
    if is_probe_alone(config):
        total_steps = 0
    patch_size = (1, 1)
    if isinstance(model, VisionTransformer):
        patch_size = model.patch_embed.patch_size
    return TrainingPlan(
        train,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        batch_size=batch_size,
        image_sizes=resolve_image_sizes(train.image_sizes or (), config.data.size, patch_size),
        mix_until=config.augment.mix_until,
    )


def build_train_step(
    config: Config,
    model: nn.Module,
    *,
    plan: TrainingPlan,
    device: torch.device,
    loss: StepLoss,
    is_capturable: bool = True,
) -> TrainStep:
    """Build the step that trains a model. `is_capturable`: the loss does the same in each step."""
    train = config.train
    world_size = current_process().world_size
    precision = choose_precision(train.precision, device)
    parallel_model = model
    if world_size > 1:
        parallel_model = DistributedDataParallel(model)
    is_ours = isinstance(model, VisionTransformer)
    compiles = _compile(config, model, plan, device)
    optimizer = create_optimizer(
        model=model, muon_dtype=getattr(torch, precision), **config.optimizer.model_dump()
    )
    # A short run may end before a warm-up of whole epochs would.
    warmup_steps = round(config.schedule.warmup_epochs * plan.steps_per_epoch)
    lr_factor = partial(
        schedule_factor,
        name=config.schedule.name,
        warmup_steps=min(warmup_steps, max(plan.total_steps - 1, 0)),
        total_steps=plan.total_steps,
    )
    # Several processes share the cores already, and compiled code keeps Python's lock. Other models
    # may compute something of the whole batch, or draw from torch's own generator.
    threads = None
    has_cores = device.type == "cpu" and torch.get_num_threads() > 1 and world_size == 1
    if has_cores and is_ours and not compiles:
        threads = BatchThreads()
    grad_accum_steps = train.grad_accum_steps
    if grad_accum_steps == "auto":
        grad_accum_steps = _count_parts(config, model, plan.batch_size // world_size, device)
    return TrainStep(
        parallel_model,
        optimizer,
        lr_factor,
        loss,
        precision=precision,
        clip_grad=train.clip_grad,
        grad_accum_steps=grad_accum_steps,
        ema_decay=train.ema_decay,
        threads=threads,
        # Gradient checkpointing reads the state of the device's random numbers; other models may do
        # something else in each step.
        is_capturable=is_capturable and is_ours and not train.grad_checkpointing,
    )


def _count_parts(config: Config, model: nn.Module, batch_size: int, device: torch.device) -> int:
    """Choose the number of parts of a batch: of our models on a CPU the widest activation of a
    part, the MLP's hidden one, stays in the caches. Elsewhere the batch is one part."""
    if device.type != "cpu" or not isinstance(model, VisionTransformer):
        return 1
    height, width = config.data.size
    patch_height, patch_width = model.patch_embed.patch_size
    num_patches = (height // patch_height) * (width // patch_width)
    widths = [m.out_features for m in model.blocks[0].modules() if isinstance(m, nn.Linear)]
    image_bytes = _BYTES_PER_VALUE * num_patches * max(widths)
    part_size = max(_CACHE_BYTES * torch.get_num_threads() // image_bytes, 1)
    return -(-batch_size // part_size)


def _compile(config: Config, model: nn.Module, plan: TrainingPlan, device: torch.device) -> bool:
    """Let torch compile the blocks of our models when they first run, and return whether it does.
    Nothing is measured for it, so that a resumed run decides as the interrupted one did."""
    if not isinstance(model, VisionTransformer):
        return False
    compiles = config.train.compile is True
    if config.train.compile == "auto" and device.type == "cuda":
        num_images = plan.batch_size * plan.total_steps
        compiles = num_images >= _WORTHWHILE_IMAGES * max(len(plan.image_sizes), 1)
    if compiles:
        # torch's own choice is the folder for temporary files, which is emptied now and then.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default_cache_dir() / "compiled"))
        torch._dynamo.config.recompile_limit = _MAX_COMPILED
        for block in model.blocks:
            # From the third size on, torch would make sizes symbols, which a CUDA graph can't have.
            block.compile(dynamic=False)
    return compiles
