"""Whole runs: each loader, optimizer and precision, and what a step asks of the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.device.conftest import Count, Counter, Meter
from tests.training.conftest import flatten, read_metrics, run_until
from vit.build import run as build
from vit.build.run import Run
from vit.config import load_config
from vit.runtime.processes import Process
from vit.training.observers import LOG_EVERY_STEPS, MetricsFile, Observer
from vit.training.state import collect_state

TINY = [
    *("data.image_size=8", "model.patch_size=4", "model.embed_dim=16", "model.depth=2", "model.num_heads=2"),
    *("train.batch_size=32", "train.epochs=1", "train.max_steps=4", "train.attention_maps=0"),
]
RECIPES = {
    "resident, muon, average, two micro-batches": [
        *("augment.crop_padding=1", "augment.flip=random", "augment.cutout=2", "augment.mixup=0.8"),
        *("optimizer.name=muon", "train.ema_decay=0.9", "train.grad_accum_steps=2", "train.clip_grad=1.0"),
        *("model.drop_path_rate=0.2", "model.global_pool=attention", "train.precision=float32"),
    ],
    "resident, muon in bfloat16": [
        *("augment.rand_augment=[2,9]", "augment.color_jitter=0.3", "augment.re_prob=0.3", "augment.cutmix=1.0"),
        *("optimizer.name=muon", "train.precision=bfloat16", "model.stem=conv", "model.patch_size=4"),
    ],
    "resident, adamw, several sizes, unequal classes": [
        *("augment.resized_crop_scale=[0.5,1]", "augment.trivial_augment=true", "train.class_balance=weights"),
        *("optimizer.name=adamw", "optimizer.layer_decay=0.8", "train.label_smoothing=0.1", "train.epochs=2"),
        *("train.image_sizes=[[0.5,0.5],[1,1]]", "train.max_steps=44", "train.precision=float32"),
        *("model.mlp=swiglu", "model.reg_tokens=2", "model.qk_norm=true", "model.init_values=0.1"),
    ],
    "workers, adamw in bfloat16": [
        *("data.name=folder", "data.pipeline=workers", "data.workers=0", "train.batch_size=8", "train.epochs=2"),
        *("augment.resized_crop_scale=[0.5,1]", "augment.flip=random", "train.precision=bfloat16"),
        *("optimizer.name=adamw", "train.ema_decay=0.9", "train.class_balance=sampler"),
    ],
    "resident, sgd, gradients recomputed": [
        *("optimizer.name=sgd", "train.grad_checkpointing=true", "train.precision=float32", "model.freeze=1"),
        *("model.global_pool=avg", "model.mlp=relu2", "model.pos_embed=sincos", "augment.flip=alternating"),
    ],
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in "abc":
        (root / name).mkdir()
        for number in range(20):
            Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(root / name / f"{number}.png")
    return root


def make(directory: Path, overrides: list[str], photos: Path, device: str, *observers: Observer) -> Run:
    directory.mkdir(exist_ok=True)
    root = [f"data.root={photos}"] if "data.name=folder" in overrides else []
    config = load_config(None, [*TINY, *overrides, *root])
    of_run: dict[str, Any] = {"directory": directory, "process": Process(), "device_name": device}
    return build.build_run(config, **of_run, observers=[MetricsFile(directory), *observers])


class Steps(Observer):
    """Counts what each step transfers, and where its tensors lie."""

    is_essential = True

    def __init__(self, meter: Meter) -> None:
        self.meter, self.counts, self.places = meter, dict[int, Count](), list[dict[str, int]]()
        self.lines, self.run = dict[int, Counter](), cast(Run, None)
        self.epoch_ended = True

    def on_step(self, metrics: dict[str, Any]) -> None:
        count = self.meter.read()
        if not self.epoch_ended:  # the first one of an epoch has the evaluation, the checkpoint and the start in it
            self.counts[metrics["step"]], self.lines[metrics["step"]] = count, self.meter.lines
        self.epoch_ended = False
        step = self.run.trainer.step
        tensors = flatten(collect_state(step))
        tensors |= {f"gradient {n}": p.grad for n, p in step.model.named_parameters() if p.grad is not None}
        self.places.append({name: t.host.data_ptr() for name, t in tensors.items() if hasattr(t, "host")})

    def on_epoch(self, metrics: dict[str, Any], model: torch.nn.Module) -> None:
        self.epoch_ended = True


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_equals_the_cpus_with_one_copy_a_step_and_no_wait(
    meter: Meter, table: Callable[..., None], photos: Path, tmp_path: Path, name: str
) -> None:
    steps = Steps(meter)
    steps.run = make(tmp_path / "npu", RECIPES[name], photos, "npu", steps)
    steps.run.trainer.run()
    silent = {count for step, count in steps.counts.items() if step % LOG_EVERY_STEPS}
    table(f"training step: {name}", max(silent))
    assert silent == {Count(1, 0, 0)}, steps.lines
    assert all(count.waits <= 1 for count in steps.counts.values())  # where it logs
    # weights, gradients, average and optimizer stay where they are: a CUDA graph writes to fixed addresses
    assert len({tuple(sorted(places.items())) for places in steps.places[1:]}) == 1
    of_cpu = make(tmp_path / "cpu", RECIPES[name], photos, "cpu")
    of_cpu.trainer.run()
    states = [flatten(collect_state(run.trainer.step)) for run in (of_cpu, steps.run)]
    assert states[0].keys() == states[1].keys()
    limit = 2e-2 if "bfloat16" in name else 2e-4
    for key, expected in states[0].items():
        difference = (states[1][key].cpu().double() - expected.double()).norm()
        assert difference <= limit * max(float(expected.double().norm()), 1e-2), key
    for found, expected in zip(*(read_metrics(tmp_path / device) for device in ("npu", "cpu")), strict=True):
        assert found == pytest.approx(expected, rel=limit, abs=limit)


def test_a_resumed_run_ends_with_the_same_bytes(npu: Counter, photos: Path, tmp_path: Path) -> None:
    overrides = [*RECIPES["resident, muon, average, two micro-batches"], "train.checkpoint_every_steps=2"]
    whole = make(tmp_path / "whole", overrides, photos, "npu")
    whole.trainer.run()
    run_until(make(tmp_path / "broken", overrides, photos, "npu"), 4)
    resumed = make(tmp_path / "broken", overrides, photos, "npu")
    assert resumed.trainer.resume()
    assert resumed.trainer.progress.step == 2
    resumed.trainer.run()
    states: list[dict[str, Tensor]] = [flatten(collect_state(run.trainer.step)) for run in (whole, resumed)]
    assert all(torch.equal(states[0][key].cpu(), states[1][key].cpu()) for key in states[0])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "broken")


def test_a_step_that_is_not_finite_is_named(npu: Counter, photos: Path, tmp_path: Path) -> None:
    run = make(tmp_path / "run", RECIPES["resident, sgd, gradients recomputed"], photos, "npu")
    with torch.no_grad():
        run.model.head.weight[0, 0] = float("nan")  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"step 1: .*first seen in head; images .*, … \(32\)"):
        run.trainer.run()
