"""Configuration → the parts of a training run, put together.

Nothing else builds a run. `vit.training.automatic` hands over what it built to choose a recipe.
"""

import copy
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vit.config import Config
from vit.data.loader import TrainLoader
from vit.data.preprocess import Preprocess
from vit.data.splits import DatasetSplits
from vit.data.statistics import compute_class_weights
from vit.data.workers import Transform
from vit.model.checkpoint import CheckpointStore
from vit.model.model_file import MODEL_FILE, ModelFile
from vit.model.presets import compute_flops
from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer, schedule_factor
from vit.runtime.arguments import resolve_image_sizes
from vit.runtime.background_writer import BackgroundWriter
from vit.runtime.device import (
    allow_tf32,
    choose_device,
    choose_precision,
    use_deterministic_algorithms,
)
from vit.runtime.files import default_cache_dir
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import Process
from vit.training.compiled_function import should_compile
from vit.training.data import TrainingData, build_data, build_dataset, build_train_loader
from vit.training.identity import RunIdentity
from vit.training.micro_batches import choose_grad_accum_steps
from vit.training.model import build_model, check_loss, check_user_model
from vit.training.model_writer import BundleWriter, read_run_model
from vit.training.observers import MetricsFile, Observer, ProgressBar
from vit.training.plan import TrainingPlan
from vit.training.probe import (
    FittedProbe,
    build_probed_model,
    fit_to_data,
    is_probe_alone,
    rebuild_probed_model,
    uses_probe,
)
from vit.training.step_graphs import choose_capture_stream, on_stream
from vit.training.teacher import Teacher, ask_teacher
from vit.training.tensorboard import TensorBoard
from vit.training.threaded_step import choose_threads
from vit.training.tokens import keep_tokens
from vit.training.train_step import Loss, TrainStep
from vit.training.trainer import Trainer
from vit.training.validation import HeldAside, ImageValidator

# Buckets of gradients; each is exchanged as soon as it is full. The largest size is torch's own.
_MIN_BUCKETS = 8
_MAX_BUCKET_MB = 25.0


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts of a run that are there before it is built: passed from Python, or made when the
    configuration was chosen. `build_run` makes the others.

    Attributes:
        splits: The images, opened.
        transform: Function of one image, passed from Python.
        user_model: Module passed from Python, which is trained.
        loss: Function passed from Python, which takes the place of the cross-entropy.
        class_weights: Weights of the classes in the loss by their names, passed from Python.
        model: Model of the run; it ends at the probe's block if there is a `probe`.
        pretrained: Preprocessing that the loaded weights were trained with.
        data: Images, decoded, with the configuration of the run.
        probe: Probe that the model starts from.
        uncut_model: Model that the probe was fitted on, where nothing is trained after it.
        tokens: Tokens of the training images after the frozen blocks.
    """

    splits: DatasetSplits | None = None
    transform: Transform | None = None
    user_model: nn.Module | None = None
    loss: Loss | None = None
    class_weights: Mapping[str, float] | None = None
    model: nn.Module | None = None
    pretrained: Preprocess | None = None
    data: TrainingData | None = None
    probe: FittedProbe | None = None
    uncut_model: nn.Module | None = None
    tokens: Float[Tensor, "n V N D"] | None = None


@dataclass(frozen=True)
class Run:
    """The parts of a training run that are needed once it is built.

    Attributes:
        config: Configuration with the pipeline that was chosen. Whoever resumes the run takes the
            same pipeline, whatever memory is free then.
        image_loader: Loader of pictures, where the batches of the trainer hold tokens.
        probe: Probe that the model starts from, if it was fitted for this run now.
        uncut_model: See `RunParts`.
        teacher: Teacher of the run.
    """

    config: Config
    data: TrainingData
    trainer: Trainer
    image_loader: TrainLoader
    probe: FittedProbe | None
    uncut_model: nn.Module | None
    teacher: Teacher | None = None


def build_run(
    config: Config,
    *,
    directory: Path,
    process: Process,
    device_name: str,
    parts: RunParts = RunParts(),
    observers: Sequence[Observer] | None = None,
    resume: bool = False,
) -> Run:
    """Build a training run, ready to start or to resume.

    Args:
        config: Configuration of the run.
        directory: Directory of the run.
        process: This process's place in the run.
        device_name: Device of this process, such as "cuda:1".
        parts: Parts that are there already.
        observers: Observers of the run. None: a progress bar, the metrics file and TensorBoard.
        resume: If the run in `directory` has left a checkpoint, take its model instead of fitting a
            probe.
    """
    if parts.loss is not None and is_probe_alone(config):
        raise ValueError("loss is for training steps, and this run is a linear probe alone")
    device = choose_device(device_name)
    use_deterministic_algorithms(config.train.deterministic and device.type == "cuda")
    keep_freed_memory()

    model, data = _build_model_and_data(config, parts, process, device)
    probe = parts.probe
    uncut_model = parts.uncut_model
    checkpoints = CheckpointStore(directory / "checkpoints")
    if probe is None and uses_probe(config) and isinstance(model, VisionTransformer):
        if is_probe_alone(config):
            uncut_model = model
        left_model = None
        if resume:
            if process.is_main:
                left_model = _read_left_model(checkpoints, directory)
            left_model = process.broadcast(left_model)
        if left_model is not None:
            origin = str(directory / MODEL_FILE)
            model = rebuild_probed_model(config, left_model, origin=origin)
        else:
            probe = fit_to_data(config, model, data, device=device)
            model = build_probed_model(config, model, probe.probe)
        model.to(device)
    tokens = parts.tokens
    if tokens is None:
        data, tokens = keep_tokens(model, data, device=device, transform=parts.transform)

    teacher = _find_teacher(config, parts, data, device)
    teacher_hash = targets = None
    if teacher is not None:
        targets = teacher.build_targets(data.train.labels)
        teacher_hash = teacher.weights_hash
    build_loader = partial(
        build_train_loader,
        data,
        device=device,
        process=process,
        transform=parts.transform,
        targets=targets,
    )
    image_loader = train_loader = build_loader()
    if tokens is not None:
        train_loader = build_loader(tokens=tokens)
    plan = _plan_batches(config, model, train_loader)
    train_step = _build_step(config, parts, model, data, plan=plan, process=process, device=device)

    validator = None
    if data.validation is not None:
        validator = ImageValidator(data, device, HeldAside(config.train.select_by))
    writer = BackgroundWriter()
    if observers is None:
        observers = [
            ProgressBar(len(data.validation or ())),
            MetricsFile(directory, writer),
            TensorBoard(directory, image_loader, validator),
        ]

    section = config.data.model_copy(update={"pipeline": data.pipeline})
    config = config.model_copy(update={"data": section})
    identity = RunIdentity.from_config(
        config,
        data_fingerprint=data.train.fingerprint,
        conditions={
            "the kind of device": device.type,
            "the precision": train_step.precision,
            "torch's version": str(torch.__version__),
        },
        transform=parts.transform,
        model=parts.user_model,
        loss=parts.loss,
        class_weights=parts.class_weights,
        teacher=teacher_hash,
    )
    trainer = Trainer(
        train_step=train_step,
        plan=plan,
        train_batches=train_loader,
        validator=validator,
        checkpoints=checkpoints,
        model_writer=BundleWriter(directory, config, data, process, identity.run_id, writer),
        observers=list(observers) if process.is_main else [],
        process=process,
        identity=identity,
        writer=writer,
        keeps_first_model=uses_probe(config),
    )
    return Run(config, data, trainer, image_loader, probe, uncut_model, teacher)


def _build_model_and_data(
    config: Config, parts: RunParts, process: Process, device: torch.device
) -> tuple[nn.Module, TrainingData]:
    """Return the model, on its device, and the images, opening what is not in `parts`."""
    splits = parts.splits or build_dataset(config)
    num_classes = len(splits.split("train").class_names)
    model = parts.model
    pretrained = parts.pretrained
    if parts.user_model is not None:
        model = parts.user_model
        check_user_model(config, model, num_classes=num_classes)
    elif model is None:
        model, pretrained = build_model(config, num_classes=num_classes)
    data = parts.data
    if data is None:
        data = build_data(
            config,
            splits,
            device=device,
            pretrained=pretrained,
            class_weights=parts.class_weights,
            has_transform=parts.transform is not None,
            while_decoding=partial(
                _compile_ahead, config, parts, model, process=process, device=device
            ),
        )
    # The model moves first, because the optimizer creates its state on the device of the weights.
    return model.to(device), data


def _compile_ahead(
    config: Config,
    parts: RunParts,
    model: nn.Module,
    data: TrainingData,
    *,
    process: Process,
    device: torch.device,
) -> None:
    """Compile the first step: a copy of the model computes a batch of zeros, forward and backward.
    The first step itself reports what fails."""
    # Other models and losses may keep a state.
    if not isinstance(model, VisionTransformer) or parts.loss is not None:
        return
    # Other processes wait for the images. With a probe or tokens, the first step is another one.
    if process.world_size > 1 or uses_probe(config) or config.keeps_tokens:
        return
    loader = build_train_loader(data, device=device, process=process)
    plan = _plan_batches(config, model, loader)
    if not choose_compile(config, model, plan, device):
        return
    blank = copy.deepcopy(model).train()
    blank.patch_drop_rate = plan.patch_drop_rate(0)
    step = _build_step(config, parts, blank, data, plan=plan, process=process, device=device)
    size = plan.image_size(0) or config.data.size
    images = torch.zeros(plan.batch_size, 3, *size, device=device)
    targets = torch.zeros(plan.batch_size, dtype=torch.int64, device=device)
    is_mixed = loader.augmentation.mixing and plan.mix_until > 0
    if is_mixed or step.multilabel or step.has_teacher:
        num_columns = len(data.train.class_names) * (1 + step.has_teacher)
        targets = torch.zeros(plan.batch_size, num_columns, device=device)
    with (
        suppress(Exception),
        warnings.catch_warnings(),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        allow_tf32(step.tf32),
    ):
        warnings.filterwarnings("ignore", message="torch could not compile")
        step.forward_backward(images, targets)


def _plan_batches(config: Config, model: nn.Module, loader: TrainLoader) -> TrainingPlan:
    """Plan epochs of the loader."""
    return build_plan(
        config,
        model,
        steps_per_epoch=len(loader),
        batch_size=loader.batch_size,
        multilabel=loader.dataset.is_multilabel,
    )


def _build_step(
    config: Config,
    parts: RunParts,
    model: nn.Module,
    data: TrainingData,
    *,
    plan: TrainingPlan,
    process: Process,
    device: torch.device,
) -> TrainStep:
    """Build the step, with the loss that suits the images."""
    multilabel = data.train.is_multilabel
    weights = data.class_weights
    if weights is None and data.class_balance == "weights":
        weights = compute_class_weights(data.train.labels, len(data.train.class_names))
    class_weights = None
    if weights is not None:
        class_weights = torch.from_numpy(weights).to(device)
    if parts.loss is not None:
        if data.class_balance == "asymmetric":
            raise ValueError("train.class_balance=asymmetric and loss= are both losses; use one")
        check_loss(
            config,
            parts.loss,
            num_classes=len(data.train.class_names),
            device=device,
            has_class_weights=class_weights is not None,
            multilabel=multilabel,
        )
    return build_train_step(
        config,
        model,
        plan=plan,
        process=process,
        device=device,
        loss=parts.loss,
        has_teacher=config.train.teacher is not None,
        multilabel=multilabel,
        asymmetric=data.class_balance == "asymmetric",
        class_weights=class_weights,
        compile=choose_compile(config, model, plan, device),
    )


def _find_teacher(
    config: Config, parts: RunParts, data: TrainingData, device: torch.device
) -> Teacher | None:
    """Return the teacher of a run, with its answers; None if the configuration names none. Raise
    ValueError for a run without steps that could learn from it."""
    if config.train.teacher is None:
        return None
    if parts.loss is not None or is_probe_alone(config):
        raise ValueError(
            "train.teacher is for training steps with the loss of vit.train; leave it out for a"
            " linear probe alone, or with loss="
        )
    if data.train.is_multilabel:
        raise ValueError(
            "train.teacher is for one class an image, and these images have several labels; leave it"
            " out"
        )
    return ask_teacher(config, data, device=device)


def _read_left_model(checkpoints: CheckpointStore, directory: Path) -> ModelFile | None:
    """Read the model file of the run that left the checkpoints. None without checkpoints, with which
    alone a run goes on, or without a model of ours. Raises ValueError for a file of another run."""
    run_id = checkpoints.find_run_id()
    if run_id is None:
        return None
    content = read_run_model(directory, run_id=run_id)
    if content is None or "architecture" not in content.metadata:
        return None
    return content


def build_plan(
    config: Config,
    model: nn.Module,
    *,
    steps_per_epoch: int,
    batch_size: int,
    multilabel: bool = False,
) -> TrainingPlan:
    """Plan how long a run is, and what happens when.

    Args:
        config: Configuration of the run.
        model: Model to be trained. Image sizes are multiples of its patches.
        steps_per_epoch: Batches of an epoch.
        batch_size: Images of a step, over all processes.
        multilabel: An image may have several labels.

    Raises:
        ValueError: `train.select_by` is a measure of several labels, and an image has one.
    """
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
        image_sizes=resolve_image_sizes(
            train.image_sizes, image_size=config.data.image_size, patch_size=patch_size
        ),
        mix_until=config.augment.mix_until,
    )


def build_train_step(
    config: Config,
    model: nn.Module,
    *,
    plan: TrainingPlan,
    process: Process,
    device: torch.device,
    loss: Loss | None = None,
    has_teacher: bool = False,
    multilabel: bool = False,
    asymmetric: bool = False,
    class_weights: Float[Tensor, " C"] | None = None,
    compile: bool = False,
) -> TrainStep:
    """Build the step that trains a model: the model in its processes, the average of its weights,
    optimizer and schedule.

    Args:
        config: Configuration of the run.
        model: Model to be trained.
        plan: Plan of the run.
        process: This process's place in the run.
        device: Device of this process.
        loss: Loss instead of the cross-entropy.
        has_teacher: See `TrainStep`.
        multilabel: An image may have several labels.
        asymmetric: See `TrainStep`.
        class_weights: Weights of the classes in the loss; None for equal ones.
        compile: Compile the forward pass.
    """
    train = config.train
    precision = choose_precision(train.precision, device)
    stream = choose_capture_stream(process, device)
    with on_stream(stream):
        parallel_model = wrap_model(model.to(device), process, exchange=train.gradient_exchange)
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
    # A short run may end before a warm-up of whole epochs would.
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
        # The free memory of several GPUs differs.
        grad_accum_steps = process.broadcast(grad_accum_steps)
    # Several processes share the cores already, and compiled code keeps Python's lock.
    threads = None
    if process.world_size == 1 and not compile:
        threads = choose_threads(model, device=device)
    return TrainStep(
        parallel_model,
        optimizer,
        lr_factor,
        precision=precision,
        loss=loss,
        has_teacher=has_teacher,
        multilabel=multilabel,
        asymmetric=asymmetric,
        label_smoothing=train.label_smoothing,
        class_weights=class_weights,
        clip_grad=train.clip_grad,
        grad_accum_steps=grad_accum_steps,
        ema_decay=train.ema_decay,
        tf32=train.tf32,
        compile=compile,
        threads=threads,
        capture_stream=stream,
    )


def wrap_model(model: nn.Module, process: Process, *, exchange: str) -> nn.Module:
    """In a run of several processes, average the model's gradients over them, sent in the data type
    `exchange`. The gradients of the last layers are exchanged during the backward pass of the
    first."""
    if process.world_size == 1:
        return model
    num_bytes = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    # One bucket of torch's size would hold a small model whole, and its exchange would begin only
    # when the backward pass has ended.
    bucket_mb = min(max(num_bytes / 2**20 / _MIN_BUCKETS, 1.0), _MAX_BUCKET_MB)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    # Times of kernels, which a CUDA graph doesn't have, are read in its first ten steps only.
    wrapped._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]
    if exchange == "bfloat16":
        # takes a second to import
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def choose_compile(
    config: Config, model: nn.Module, plan: TrainingPlan, device: torch.device
) -> bool:
    """Return whether the step is compiled. Other models than ours are compiled only if the
    configuration says so."""
    compiles = config.train.compile
    if compiles == "auto":
        # Threads that divide the batch gain more than compiled code, and can't run it side by side.
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
        # torch's own choice is the folder for temporary files, which is emptied now and then.
        directory = (config.data.cache_dir or default_cache_dir()) / "compiled"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(directory))
    return compiles
