"""1, 2, 4 and 8 processes train alike; they exchange what docs/processes.md says, and name who is lost or slow."""

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from processes import RUN, measure_overlap, read_steps, train_recorded
from torch import nn

from tests.training.conftest import TINY
from tests.training.worlds import join_world, run_command, start_world
from vit.build.run import build_model
from vit.config import load_config
from vit.runtime.processes import Process
from vit.training.stragglers import Stragglers, Timer

SETTINGS = [
    "model.embed_dim=32",
    "model.depth=3",
    "model.global_pool=avg",
    "train.batch_size=64",
    "train.max_steps=24",
    "optimizer.lr=5e-3",
]
FLOAT32 = 4  # bytes

Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """train(size, parallel, …): a line for each step of the run of so many processes, which is done once."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def train(size: int, parallel: str, *overrides: str) -> list[dict[str, Any]]:
        if (key := (size, parallel, *overrides)) not in found:
            directory = tmp_path_factory.mktemp("world")
            settings = [*SETTINGS, f"train.parallel={parallel}", *overrides]
            assert join_world(start_world(_train, directory, settings, size=size)) == [0] * size
            found[key] = read_steps(directory)
        return found[key]

    return train


def _train(directory: Path, overrides: list[str]) -> None:
    train_recorded(directory, overrides, count=True)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_any_number_of_processes_has_the_loss_curve_of_one(train: Train, size: int, parallel: str) -> None:
    losses = [line["loss"] for line in train(1, "ddp")]
    assert len(losses) == 24
    assert losses[-1] < losses[0] - 0.1
    assert [line["loss"] for line in train(size, parallel)] == pytest.approx(losses, abs=1e-5)


def count_bytes(size: int) -> dict[str, int]:
    """By block, "" for what is in none: bytes of the weights whose rows are split into `size` equal parts, padded."""
    found: dict[str, int] = defaultdict(int)
    for name, parameter in build().named_parameters():
        rows, columns = parameter.shape[0], prod(parameter.shape[1:])
        found[name.split(".")[1] if name.startswith("blocks.") else ""] += FLOAT32 * size * -(-rows // size) * columns
    return dict(found)


def build() -> nn.Module:
    """The model of the runs."""
    return build_model(load_config({}, [*RUN, *SETTINGS]), num_classes=10)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_ddp_exchanges_the_gradients_once(train: Train, size: int) -> None:
    step = train(size, "ddp")[10]
    loss_and_correct, stop = 2 * FLOAT32, 8 * size
    assert step["calls"] == {"allreduce_": 1 + 2}  # of so small a model, one bucket
    assert step["bytes"] == {"allreduce_": sum(count_bytes(1).values()) + loss_and_correct + stop}


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp_gathers_weights_twice_and_scatters_gradients_once(train: Train, size: int) -> None:
    step, weights = train(size, "fsdp")[10], count_bytes(size)
    blocks = len(weights) - 1
    loss_and_correct, norms, stop = 2 * FLOAT32, FLOAT32 * len(list(build().parameters())), 8 * size
    gathered, scattered = 2 * blocks + 1, blocks + 1
    reduced = {"allreduce_": 2, "all_reduce": 1}
    assert step["calls"] == {"_allgather_base_": gathered, "_reduce_scatter_base_": scattered, **reduced}
    assert step["bytes"] == {
        "_allgather_base_": 2 * sum(weights.values())
        - weights[""],  # what is in no block is kept after the forward pass
        "_reduce_scatter_base_": sum(weights.values()),
        "allreduce_": loss_and_correct + stop,
        "all_reduce": norms,
    }


def test_gradients_are_exchanged_while_the_backward_pass_computes(train: Train) -> None:
    larger = ["model.embed_dim=128", "model.depth=6", "train.max_steps=4"]
    step = train(2, "ddp", *larger)[2]
    assert step["calls"]["allreduce_"] >= 4 + 2
    assert measure_overlap(step["order"]) >= 0.7


def test_a_block_s_weights_are_gathered_before_the_block_in_front_computes(train: Train) -> None:
    order = [name for name, _ in train(2, "fsdp")[10]["order"]]
    kinds = [name if name.startswith("_") else "product" for name in order if name not in ("allreduce_", "all_reduce")]
    gathered = [place for place, name in enumerate(kinds) if name == "_allgather_base_"]
    assert gathered[:2] == [0, 1]  # what is in no block and the first block, before anything is computed
    blocks = range(2, len(gathered) - 1)
    assert all("product" in kinds[gathered[i] : gathered[i + 1]] for i in blocks), kinds
    assert kinds[-1] == "_reduce_scatter_base_"


@pytest.mark.parametrize(
    ("parallel", "fate"),
    [
        ("ddp", signal.SIGSTOP),
        ("fsdp", signal.SIGKILL),
        pytest.param("ddp", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("fsdp", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_hangs_or_ends_is_named_in_time(tmp_path: Path, parallel: str, fate: signal.Signals) -> None:
    settings = ["digits", *TINY, "optimizer.name=adamw", f"train.parallel={parallel}", "train.epochs=1000"]
    settings += ["train.batch_size=96", "train.ema_decay=null", "train.checkpoint_every_steps=1"]
    run = tmp_path / "run"
    world = start_world(run_command, run, *settings, "train.timeout_seconds=3", size=3)
    deadline = time.monotonic() + 60
    while not any(path.name >= "step-00000003" for path in (run / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lost_at = time.monotonic()
    os.kill(world[1].pid or 0, fate)
    codes = join_world([world[0], world[2]], timeout=30)
    seconds = time.monotonic() - lost_at
    world[1].kill()
    assert codes == [75, 75]
    assert seconds < (3 if fate == signal.SIGSTOP else 0) + 5 + 5  # to find it, to hear from the others, to end
    for rank in ("0", "2"):
        (line,) = [text for text in (tmp_path / f"{rank}.txt").read_text().splitlines() if "hangs" in text]
        assert line.startswith(f"process 1 of 3 has ended or hangs (process {rank}: ")
        assert line.endswith("; continue with --resume")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_slow_process_is_named(tmp_path: Path, parallel: str) -> None:
    settings = ["digits", *TINY, "optimizer.name=adamw", f"train.parallel={parallel}", "train.max_steps=40"]
    settings += ["train.batch_size=64", "train.ema_decay=null", "train.epochs=1000"]
    world = start_world(run_command, tmp_path / "run", *settings, "--slow", size=2)
    assert join_world(world) == [0, 0]
    assert "process 1 of 2 is slow: its batches and forward passes take " in (tmp_path / "0.txt").read_text()


class Others(Process):
    """A process whose others took so many seconds."""

    def gather(self, value: float) -> list[float]:
        return [value, *self.seconds]

    seconds: tuple[float, ...] = ()


def test_a_process_is_slow_when_it_costs_a_tenth_of_a_step_twice_in_succession() -> None:
    process, timer = Others(0, 4), Timer()
    stragglers = Stragglers(process)

    def check(*seconds: float, step: float) -> list[str]:
        timer.seconds, Others.seconds = seconds[0], seconds[1:]
        stragglers._checked_at = time.perf_counter() - step
        return stragglers.check(timer)

    assert check(1, 1, 2, 1, step=3) == []  # the first time it may be chance
    assert check(1, 1, 1, 1, step=3) == []
    assert check(1, 1, 2, 1, step=3) == []
    (sentence,) = check(1, 1, 2, 1, step=3)
    assert sentence.startswith("process 2 of 4 is slow: ")
    assert "2.0 times as long" in sentence
    assert check(1, 1, 2, 1, step=3) == []  # said already
    assert [check(1, 2, 1, 1, step=30) for _ in range(3)] == [[], [], []]  # too little of a step
    assert [check(1, 1.1, 1, 1, step=1) for _ in range(3)] == [[], [], []]
    assert timer.seconds == 0
