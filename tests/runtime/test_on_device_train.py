"""Whole runs: each loader, optimizer and precision, and what a step asks of the device."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import save_noise
from tests.pretend_device import DeviceTensor
from tests.runtime.conftest import Count, Counter, Meter
from tests.training.conftest import flatten, read_metrics
from tests.training.test_graphs import Recorder
from vit.config import load_config
from vit.training import run as build
from vit.training.observers import LOG_EVERY_STEPS, Observer
from vit.training.run import Run
from vit.training.train_step import TrainStep

TINY = [
    *(
        "data.image_size=8",
        "model.patch_size=4",
        "model.embed_dim=16",
        "model.depth=2",
        "model.num_heads=2",
    ),
    *("train.batch_size=32", "train.epochs=1", "train.max_steps=4"),
]
RECIPES = {
    "resident, muon, average, two micro-batches": [
        *("augment.crop_padding=1", "augment.flip=random", "augment.cutout=2", "augment.mixup=0.8"),
        *(
            "optimizer.name=muon",
            "train.ema_decay=0.9",
            "train.grad_accum_steps=2",
            "train.clip_grad=1.0",
        ),
        *("model.drop_path_rate=0.2", "model.global_pool=avg", "train.precision=float32"),
    ],
    "resident, muon in float16, two micro-batches": [
        *("optimizer.name=muon", "train.precision=float16", "train.clip_grad=1.0"),
        *("train.grad_accum_steps=2", "train.ema_decay=0.9", "model.global_pool=avg"),
    ],
    "resident, adamw, several sizes, unequal classes": [
        *(
            "augment.resized_crop_scale=[0.5,1]",
            "train.class_balance=weights",
        ),
        *(
            "optimizer.name=adamw",
            "optimizer.layer_decay=0.8",
            "train.label_smoothing=0.1",
            "train.epochs=2",
        ),
        *(
            "train.image_sizes=[[0.5,0.5],[1,1]]",
            "train.patch_drop_rates=[[1,0.5]]",
            "train.max_steps=22",
            "train.precision=float32",
        ),
        *(
            "train.batch_size=128",
            "model.reg_tokens=2",
            "model.qk_norm=true",
        ),
    ],
    "workers, adamw in bfloat16": [
        *(
            "data.name=folder",
            "data.pipeline=workers",
            "data.workers=0",
            "train.batch_size=8",
            "train.epochs=2",
        ),
        *("augment.resized_crop_scale=[0.5,1]", "augment.flip=random", "train.precision=bfloat16"),
        *("optimizer.name=adamw", "train.ema_decay=0.9", "train.class_balance=weights"),
    ],
    "resident, sgd, gradients recomputed": [
        *(
            "optimizer.name=sgd",
            "train.grad_checkpointing=true",
            "train.precision=float32",
            "model.freeze=1",
        ),
        *(
            "model.global_pool=avg",
            "model.pos_embed=sincos",
            "augment.flip=alternating",
        ),
    ],
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    save_noise(root, [f"{name}/{number}.png" for name in "abc" for number in range(20)])
    return root


def make(
    directory: Path, overrides: list[str], photos: Path, device: str, *observers: Observer
) -> Run:
    directory.mkdir(exist_ok=True)
    root = [f"data.root={photos}"] if "data.name=folder" in overrides else []
    config = load_config(None, [*TINY, *overrides, *root])
    run = build.build_run(config, directory=directory, device_name=device)
    run.trainer.observers = list(observers)
    return run


class Steps(Observer):
    """Transfers, operations and memory of each step, and the devices of its tensors."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.counts, self.lines = meter, dict[int, Count](), dict[int, Counter]()
        self.places, self.operations = list[dict[str, int]](), list[Any]()
        self.left_behind = set[str]()
        self.epoch_ended = True

    def watch(self, step: TrainStep, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step, run, made = step, step.run_on_device, list[Any]()
        make = DeviceTensor.__init__

        def make_and_note(tensor: DeviceTensor, host: Tensor) -> None:
            make(tensor, host)
            made.append(weakref.ref(tensor))

        def run_and_note(images: Tensor, targets: Tensor) -> Any:
            before = {place(tensor): name for name, tensor in self.name_tensors().items()}
            made.clear()
            with Recorder(list(step.module.state_dict(keep_vars=True).values())) as recorder:
                result = run(images, targets)
            self.operations.append((tuple(images.shape), recorder.operations))
            known = before | {
                place(tensor): f"result's {name}" for name, tensor in result._asdict().items()
            }
            known |= {
                place(t): "the optimizer's"
                for t in (step.optimizer.found_inf, step.optimizer.grad_scale)
                if _on(t)
            }
            known |= {place(p.grad): f"gradient {name}" for name, p in self.list_gradients()}
            left = [tensor for each in made if (tensor := each()) is not None]
            if step.num_steps:  # the first step makes the optimizer's state
                self.left_behind |= {
                    str(list(tensor.shape)) for tensor in left if place(tensor) not in known
                }
            return result

        monkeypatch.setattr(DeviceTensor, "__init__", make_and_note)
        monkeypatch.setattr(step, "run_on_device", run_and_note)

    def name_tensors(self) -> dict[str, Any]:
        tensors = flatten(self.step.state_dict())
        return {
            name: tensor for name, tensor in tensors.items() if isinstance(tensor, DeviceTensor)
        }

    def list_gradients(self) -> list[tuple[str, Any]]:
        parameters = self.step.model.named_parameters()
        return [(name, p) for name, p in parameters if p.grad is not None]

    def on_step(self, metrics: dict[str, Any]) -> None:
        count = self.meter.read()
        if (
            not self.epoch_ended
        ):  # the first one of an epoch has the evaluation, the checkpoint and the start in it
            self.counts[metrics["step"]], self.lines[metrics["step"]] = count, self.meter.lines
        self.epoch_ended = False
        self.places.append({name: place(tensor) for name, tensor in self.name_tensors().items()})

    def on_epoch(self, metrics: dict[str, Any], model: torch.nn.Module) -> None:
        self.epoch_ended = True


def place(tensor: Any) -> int:
    return int(tensor.host.untyped_storage().data_ptr())


def _on(tensor: Any) -> bool:
    return isinstance(tensor, DeviceTensor)


# a loader each, with Muon and AdamW, in each precision; the other recipes are extended tests
COMMON_RECIPES = (
    "resident, muon, average, two micro-batches",
    "resident, muon in float16, two micro-batches",
    "workers, adamw in bfloat16",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in COMMON_RECIPES else pytest.mark.extended)
        for name in RECIPES
    ],
)
def test_a_run_equals_the_cpus_with_one_copy_a_step_and_no_wait(
    meter: Meter,
    table: Callable[..., None],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Equal to the last bit."""
    steps = Steps(meter)
    run = make(tmp_path / "npu", RECIPES[name], photos, "npu", steps)
    with monkeypatch.context() as patch:
        steps.watch(run.trainer.train_step, patch)
        run.trainer.train()
    silent = {count for step, count in steps.counts.items() if step % LOG_EVERY_STEPS}
    table(f"training step: {name}", max(silent))
    # the last batch is made while the step before it is computed
    assert silent == {Count(1, 0, 0), Count(0, 0, 0)}, steps.lines
    last = max(steps.counts)
    assert steps.counts[last] == Count(0, 0, int(last % LOG_EVERY_STEPS == 0))
    assert all(count.waits <= 1 for count in steps.counts.values())  # where it logs
    # what a CUDA graph asks: weights, average and optimizer stay where they are; a step does what
    # the one before did; and it leaves nothing behind but its gradients and results
    assert len({tuple(sorted(places.items())) for places in steps.places[1:]}) == 1
    for size in {size for size, _ in steps.operations}:
        first, *others = [operations for of, operations in steps.operations[1:] if of == size]
        assert all(each == first for each in others)
    assert steps.left_behind == set()
    of_cpu = make(tmp_path / "cpu", RECIPES[name], photos, "cpu")
    of_cpu.trainer.train()
    states = [flatten(each.trainer.train_step.state_dict()) for each in (of_cpu, run)]
    assert states[0].keys() == states[1].keys()
    for key, expected in states[0].items():
        assert torch.equal(states[1][key].cpu(), expected), key
    assert read_metrics(tmp_path / "npu") == read_metrics(tmp_path / "cpu")
