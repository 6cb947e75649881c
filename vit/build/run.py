"""Config → objects: the one place where the schema meets torch."""

import copy
import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vit.build.data import NOTHING_GIVEN, Data, Given, Loader, build_data, build_dataset, build_train_loader
from vit.build.display import build_observers
from vit.build.validation import build_evaluate
from vit.bundle import MODEL_FILE, save_bundle
from vit.checkpoint import CheckpointStore
from vit.config import Config, plain_values
from vit.data.balance import compute_class_weights
from vit.data.images import Preprocess
from vit.data.sets.given import GIVEN
from vit.evaluation.metrics import Scores
from vit.model.model_file import read_model_file
from vit.model.presets import PRESETS, compute_flops
from vit.model.vision_transformer import VisionTransformer
from vit.optim.create import create_optimizer
from vit.optim.schedule import create_schedule
from vit.runtime.arguments import as_pair, resolve_image_sizes
from vit.runtime.device import choose_device, choose_precision, copy_to_host, use_deterministic_algorithms
from vit.runtime.files import default_cache_dir
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import Process
from vit.training.compilation import keep_compiled_code, should_compile
from vit.training.estimate import StepCost, choose_grad_accum_steps, choose_threads, measure_step_cost
from vit.training.identity import RunIdentity
from vit.training.loop import Trainer
from vit.training.observers import Observer
from vit.training.parallel import is_sharded, wrap_model
from vit.training.plan import TrainingPlan
from vit.training.step import TrainStep

Pretrained = tuple[VisionTransformer, dict[str, Any] | None]  # what `load_pretrained` gives


@dataclass(frozen=True)
class Run:
    """A trainer with what the user is told before it starts."""

    trainer: Trainer
    data: Data
    model: nn.Module
    train_loader: Loader
    is_compiled: bool
    step_cost: StepCost | None  # not of a sharded model, which need not fit the device whole
    choices: Mapping[str, str] = field(default_factory=dict)  # what was chosen for the images, and why


def build_model(
    config: Config, *, num_classes: int, given: nn.Module | None = None, pretrained: Pretrained | None = None
) -> tuple[nn.Module, Preprocess | None]:
    """The model, with its weights drawn from `train.seed` or loaded from `model.init`, unless `pretrained` has them; in
    that case also the preprocessing that those weights were trained with. One that was `given` is taken as it is, if it
    fits."""
    wanted = config.model
    if given is not None:
        _check_model(config, given, num_classes=num_classes)
        return given, None
    if wanted.init == GIVEN:
        raise ValueError("the model of this run came from a program; give it to vit.train(model=…) again")
    torch.manual_seed(config.train.seed)
    image_size = as_pair(config.data.image_size, name="data.image_size")
    image_sizes: dict[str, Any] = {"image_sizes": config.train.image_sizes, "image_size": image_size}
    preprocess = None
    if wanted.init is not None:
        from vit.model.timm_weights import load_pretrained

        more: dict[str, Any] = {"num_classes": num_classes, "drop_path_rate": wanted.drop_path_rate}
        model, values = pretrained or load_pretrained(wanted.init, img_size=None, **more)
        preprocess = Preprocess.from_dict(values) if values else None
        resolve_image_sizes(**image_sizes, patch_size=model.patch_embed.patch_size)
        model.set_input_size(image_size)
    else:
        arguments = wanted.model_dump(exclude={"init", "preset", "freeze"}, exclude_unset=wanted.preset is not None)
        if wanted.preset is not None:
            if wanted.preset not in PRESETS:
                near = difflib.get_close_matches(wanted.preset, PRESETS, cutoff=0.3) or sorted(PRESETS)[:3]
                raise ValueError(f"unknown model.preset {wanted.preset!r}; nearest: {', '.join(near)}")
            arguments = PRESETS[wanted.preset] | arguments
            resolve_image_sizes(**image_sizes, patch_size=as_pair(arguments["patch_size"], name="model.patch_size"))
        model = VisionTransformer(**arguments | {"img_size": image_size, "num_classes": num_classes})
    if wanted.freeze != "none":
        model.freeze(wanted.freeze)
    model.patch_embed.dynamic_img_size = config.train.image_sizes is not None
    model.grad_checkpointing = config.train.grad_checkpointing
    return model, preprocess


def build_run(
    config: Config,
    *,
    directory: Path,
    process: Process,
    device_name: str,
    observers: list[Observer] | None = None,
    given: Given = NOTHING_GIVEN,
) -> Run:
    """All the parts of a training run, ready to start or to resume."""
    train, device = config.train, choose_device(device_name)
    precision, sharded = choose_precision(train.precision, device), train.parallel == "fsdp"
    use_deterministic_algorithms(train.deterministic and device.type == "cuda")
    keep_freed_memory()
    dataset = build_dataset(config, given)
    num_classes = len(dataset.split("train").class_names)
    model, pretrained = build_model(config, num_classes=num_classes, given=given.model)
    checkpoints = CheckpointStore(directory / "checkpoints", keep_limit=train.keep_limit)
    of_data: dict[str, Any] = {"process": process, "was_listed": _find_out_was_listed(checkpoints, process)}
    data = build_data(config, dataset, device=device, pretrained=pretrained, **of_data)
    if not sharded:
        model.to(device)
    train_loader = build_train_loader(config, data, device=device, process=process, transform=given.transform)
    sizes: dict[str, Any] = {"steps_per_epoch": len(train_loader), "batch_size": train_loader.batch_size}
    plan = build_plan(config, **sizes, patch_size=find_patch_size(model))
    batch_size = plan.batch_size // process.world_size
    sizes = {"batch_size": batch_size, "image_size": data.preprocess.image_size}
    grad_accum_steps = train.grad_accum_steps
    if grad_accum_steps == "auto":
        grad_accum_steps = choose_grad_accum_steps(model, device=device, **sizes)
    step_cost = None
    if not sharded:
        step_cost = measure_step_cost(model, grad_accum_steps=grad_accum_steps, precision=precision, **sizes)
    is_compiled = _choose_compile(config, model, plan, device)
    step_settings: dict[str, Any] = {"grad_accum_steps": grad_accum_steps, "compile": is_compiled}
    if data.class_balance == "weights":
        weights = compute_class_weights(data.train.labels, len(data.train.class_names))
        step_settings["class_weights"] = torch.from_numpy(weights).to(device)
    last_scores: list[Scores] = []
    if observers is None and process.is_main:
        shown: dict[str, Any] = {"plan": plan, "last_scores": last_scores, "directory": directory}
        observers = [*build_observers(config, data, train_loader, model, **shown), *given.callbacks]
    identity = RunIdentity.from_config(config, given.describe(), data_fingerprint=data.train.fingerprint)
    trainer = Trainer(
        step=build_step(config, model, plan=plan, process=process, device=device, **step_settings),
        plan=plan,
        train_batches=train_loader,
        evaluate=build_evaluate(data, device=device, precision=precision, last=last_scores),
        checkpoints=checkpoints,
        save_model=_model_writer(config, data, directory, process, identity=identity),
        has_model=lambda: has_model(directory / MODEL_FILE, identity),
        identity=identity,
        observers=observers or [],
        process=process,
        sharded=sharded,
        sample_name=lambda index: str(data.train.ids[index]),
    )
    return Run(trainer, data, model, train_loader, is_compiled, step_cost)


def _find_out_was_listed(checkpoints: CheckpointStore, process: Process) -> bool | None:
    """Whether the images of the run that may go on were listed: earlier versions decoded all before the first step.
    None where there is no checkpoint."""
    found = checkpoints.load_latest(warn=lambda _: None) if process.is_main else None
    return process.broadcast(None if found is None else bool(found[0].get("images")))


def find_patch_size(model: nn.Module) -> tuple[int, int]:
    """Which image sizes are multiples for the model; of others than ours, any."""
    return model.patch_embed.patch_size if isinstance(model, VisionTransformer) else (1, 1)


def _check_model(config: Config, model: nn.Module, *, num_classes: int) -> None:
    """Raise ValueError where the model does not map images of the size to logits of the classes."""
    if config.train.parallel == "fsdp" and not hasattr(model, "blocks"):
        raise ValueError(f"train.parallel=fsdp shards a model's blocks, and {type(model).__name__} has none; use ddp")
    if config.train.patch_drop_rates and not hasattr(model, "patch_drop_rate"):
        raise ValueError(f"train.patch_drop_rates is for vit's own models, and {type(model).__name__} is not one")
    images = torch.zeros(2, 3, *as_pair(config.data.image_size, name="data.image_size"))
    where, was_training = next(model.parameters()).device, model.training
    with torch.no_grad():
        output = model.eval()(images.to(where))
    model.train(was_training)
    shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != [2, num_classes]:
        name = type(model).__name__
        raise ValueError(f"{name} makes {shape} of {list(images.shape)}, not logits [2, {num_classes}] of the classes")


def _choose_compile(config: Config, model: nn.Module, plan: TrainingPlan, device: torch.device) -> bool:
    """Whether the step is compiled; other models than ours only where the configuration says so."""
    train, wanted = config.train, config.train.compile
    if wanted == "auto":
        wanted = False
        # threads that divide the batch gain more than compiled code does, which they can't run side by side
        is_divided = choose_threads(model, device=device) is not None
        if train.parallel != "fsdp" and isinstance(model, VisionTransformer) and not is_divided:
            num_flops = 3 * compute_flops(model.architecture) * plan.total_steps * plan.batch_size
            num_sizes = len(plan.image_sizes) or 1
            wanted = should_compile(device.type, total_flops=num_flops, num_sizes=num_sizes)
    if wanted:
        keep_compiled_code((config.data.cache_dir or default_cache_dir()) / "compiled")
    return wanted


def build_step(
    config: Config, model: nn.Module, *, plan: TrainingPlan, process: Process, device: torch.device, **more: Any
) -> TrainStep:
    """The model wrapped for its processes, with its average, optimizer and schedule; `more` for `TrainStep`."""
    train = config.train
    if train.parallel == "fsdp" and config.optimizer.name == "muon":
        raise ValueError("optimizer.name=muon needs whole matrices and train.parallel=fsdp shards them; use adamw")
    precision = choose_precision(train.precision, device)
    average_model = copy.deepcopy(model) if train.ema_decay else None
    parallel_model = wrap_model(model, process=process, parallel=train.parallel, device=device)
    if average_model is not None and train.parallel == "fsdp":
        wrap_model(average_model, process=process, parallel=train.parallel, device=device)
    optimizer = create_optimizer(model=model, **config.optimizer.model_dump(), muon_dtype=getattr(torch, precision))
    threads = None
    if process.world_size == 1 and not more.get("compile"):  # compiled code keeps Python's lock
        threads = choose_threads(model, device=device)
    return TrainStep(
        parallel_model,
        optimizer,
        create_schedule(optimizer, **build_schedule(config, plan)),
        precision=precision,
        average_model=average_model,
        halt_on_nonfinite=train.on_nonfinite == "stop",
        threads=threads,
        **train.model_dump(include={"label_smoothing", "clip_grad", "ema_decay"}),
        **more,
    )


def build_schedule(config: Config, plan: TrainingPlan) -> dict[str, Any]:
    """The arguments of `vit.optim.schedule`."""
    schedule = config.schedule
    warmup_steps = min(round(schedule.warmup_epochs * plan.steps_per_epoch), plan.total_steps - 1)
    named = schedule.model_dump(include={"name", "cooldown_fraction"})
    return {**named, "warmup_steps": warmup_steps, "total_steps": plan.total_steps}


def build_plan(config: Config, *, steps_per_epoch: int, batch_size: int, patch_size: tuple[int, int]) -> TrainingPlan:
    """How long, and what happens when."""
    train = config.train
    total_steps = min(train.epochs * steps_per_epoch, train.max_steps or sys.maxsize)
    is_constant = config.schedule.name == "constant-cooldown"
    keys = {"epochs", "seed", "on_nonfinite", "evaluate_every_epochs", "checkpoint_every_steps", "keep_every_epochs"}
    keys |= {"select_by", "early_stopping_patience", "timeout_seconds"}
    return TrainingPlan(
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        batch_size=batch_size,
        plateau_steps=round(total_steps * (1 - config.schedule.cooldown_fraction)) if is_constant else 0,
        mix_until=config.augment.mix_until,
        patch_drop_rates=tuple(train.patch_drop_rates or ()),
        image_sizes=resolve_image_sizes(train.image_sizes, image_size=config.data.image_size, patch_size=patch_size),
        **train.model_dump(include=keys),
    )


def has_model(path: Path, identity: RunIdentity) -> bool:
    """Whether the model file is whole. Raises ValueError for one of another run."""
    try:
        run_id = read_model_file(path).metadata.get("run_id")
    except (OSError, ValueError):
        return False
    if run_id not in (None, identity.run_id):  # older files have none
        raise ValueError(f"{path} is of run {run_id}, this is run {identity.run_id}; move it away and resume")
    return True


def _model_writer(
    config: Config, data: Data, directory: Path, process: Process, *, identity: RunIdentity
) -> Callable[[nn.Module], None]:
    """Writes the model file of the run: class names are in it, whatever becomes of the file that they are from."""
    values = plain_values(config)
    contents: dict[str, Any] = {
        "preprocess": data.preprocess,
        "class_names": data.train.class_names,
        "config": values | {"data": values["data"] | {"class_names": data.class_names or None}},
        "run_id": identity.run_id,
    }

    def write(model: nn.Module) -> None:
        if is_sharded(model):
            from vit.training.sharding import gather_weights  # takes seconds, which other runs don't need

            weights = gather_weights(model)
        else:
            weights = copy_to_host(model.state_dict())
        if process.is_main:
            train = data.train.completed()  # of images that are listed more is known with every step
            hashes = (np.asarray(train.digests), np.asarray(train.perceptual))
            of_data: dict[str, Any] = {"data": data.describe(), "training_hashes": hashes}
            save_bundle(directory / MODEL_FILE, model, weights=weights, **contents, **of_data)

    return write
