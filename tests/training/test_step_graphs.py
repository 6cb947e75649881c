"""Steps that are replayed as CUDA graphs, on a pretend graph: equal to the others to the last bit, and
only where they are faster; in two processes, where both decide alike."""

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.pretend_graph import CaptureHooks, PretendGraph, exchange_alone, pretend_capture
from tests.training.conftest import flatten
from tests.training.recorded import ExchangeCount
from tests.training.worlds import join_world, start_world
from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer
from vit.runtime.processes import Process, join_processes
from vit.training import step_graphs
from vit.training.run import wrap_model
from vit.training.step_graphs import StepGraph, StepGraphs, choose_capture_stream, on_stream
from vit.training.train_step import TrainStep

CPU = torch.device("cpu")


class Clock:
    """Seconds of a host, and of a device that works behind it."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def start_kernels(self, *, launch: float, run: float) -> None:
        self.device = max(self.host, self.device) + max(launch, run)
        self.host += launch

    def wait(self, *_: object) -> None:
        self.host = max(self.host, self.device)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the place of CUDA's graphs and waits, and of the clock that steps are measured by."""
    return pretend(Clock(), monkeypatch)


def pretend(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendGraph)
    monkeypatch.setattr(torch.cuda, "graph", pretend_capture)
    monkeypatch.setattr(torch.cuda, "synchronize", clock.wait)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.host)
    return clock


class Result(NamedTuple):
    total: Tensor


class Counted:
    """A step that adds up what it has seen, and the ways in which it was run."""

    def __init__(
        self,
        clock: Clock,
        monkeypatch: pytest.MonkeyPatch,
        *,
        launch: float,
        run: float,
        replay: float = 0.1,
        between: float = 0.0,
    ) -> None:
        self.between = between
        self.sum = torch.zeros(())
        self.ways: list[str] = []
        self.clock = clock
        self.seconds = {"launch": launch, "run": run}
        replay_step = StepGraph.replay

        def replay_and_note(graph: StepGraph, *batch: Tensor) -> Any:
            self.ways.append("replay")
            self.clock.start_kernels(launch=replay, run=run)
            return replay_step(graph, *batch)

        monkeypatch.setattr(StepGraph, "replay", replay_and_note)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        self.graphs = StepGraphs(self.run, optimizer, CPU)

    def run(self, images: Tensor, targets: Tensor) -> Result:
        self.ways.append("eager")
        self.clock.start_kernels(**self.seconds)
        self.sum += images.sum() + targets.sum()
        return Result(self.sum * 2)

    def do_steps(self, count: int, *, size: int = 3, settings: Any = None) -> list[float]:
        batches = [(torch.full((size,), float(n)), torch.ones(1)) for n in range(count)]
        results = []
        for batch in batches:
            # the host makes the batch, and writes its log
            self.clock.host += self.between
            results.append(self.graphs(*batch, settings=settings))
        return [float(result.total) for result in results]


# twice the sum of 3 n + 1 up to each step
EXPECTED_TOTALS = [n * (n + 1) * 3.0 + 2 * (n + 1) for n in range(10)]
# ten steps: three warm up, one is measured; what is captured runs the step's code once more
EAGER = ["eager"] * 10
REPLAYED = ["eager"] * 5 + ["replay"] * 6
GIVEN_UP = ["eager"] * 5 + ["replay"] * 2 + ["eager"] * 4


@pytest.mark.parametrize(
    ("launch", "run", "replay", "between", "expected", "described"),
    [
        pytest.param(1.0, 0.2, 0.1, 0.0, REPLAYED, (100, 200), id="launches bound it"),
        pytest.param(0.5, 1.0, 0.1, 0.0, EAGER, (500, 1000), id="the device bounds it"),
        pytest.param(0.5, 1.0, 0.1, 0.2, EAGER, (700, 1000), id="the device bounds the loop"),
        pytest.param(0.5, 0.7, 0.1, 0.3, REPLAYED, (400, 700), id="the host bounds the loop"),
        pytest.param(0.1, 0.2, 0.05, 2.0, REPLAYED, (2050, 200), id="batches bound it"),
        pytest.param(1.0, 0.2, 1.5, 0.0, GIVEN_UP, (1000, 1000), id="a replay is slower"),
        pytest.param(0.5, 0.7, 0.9, 0.3, GIVEN_UP, (800, 700), id="a slower loop"),
    ],
)
def test_the_faster_way_of_two_measured_steps_stays(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    launch: float,
    run: float,
    replay: float,
    between: float,
    expected: list[str],
    described: tuple[float, float],
) -> None:
    """With a host that also makes batches and logs between two steps."""
    times = {"launch": launch, "run": run, "replay": replay, "between": between}
    step = Counted(clock, monkeypatch, **times)
    # no result is written over by a later one
    assert step.do_steps(10) == EXPECTED_TOTALS
    assert step.ways == expected
    host, device = described
    assert step.graphs.describe() == {
        "captured": expected == REPLAYED,
        "host_milliseconds": pytest.approx(host),
        "step_milliseconds": pytest.approx(device),
    }


def test_each_shape_and_setting_is_measured_on_its_own(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Counted(clock, monkeypatch, launch=1.0, run=0.2)
    step.do_steps(10)
    for kind in ({"size": 4}, {"settings": 0.5}):
        step.ways.clear()
        step.do_steps(10, **kind)
        assert step.ways == REPLAYED
    step.ways.clear()
    step.do_steps(2)
    assert step.ways == ["replay", "replay"]
    step.graphs.forget()
    step.ways.clear()
    step.do_steps(10)
    assert step.ways == REPLAYED


def test_a_step_that_cannot_be_captured_goes_on_as_it_is_and_says_so(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Counted(clock, monkeypatch, launch=1.0, run=0.2)
    run = step.run

    def read_and_run(images: Tensor, targets: Tensor) -> Result:
        float(images.sum())  # which waits for the device
        return run(images, targets)

    step.graphs._run = read_and_run
    with pytest.warns(UserWarning, match=r"captured as a CUDA graph \(operation not") as said:
        results = step.do_steps(10)
    assert len(said) == 1
    assert results == EXPECTED_TOTALS
    assert step.ways == EAGER


def test_a_step_that_does_not_fit_twice_goes_on_as_it_is(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", capture)
    step = Counted(clock, monkeypatch, launch=1.0, run=0.2)
    with warnings.catch_warnings(action="error"):
        assert step.do_steps(10) == EXPECTED_TOTALS
    assert step.ways == EAGER


def build_step(
    optimizer: str,
    *,
    precision: Any,
    process: Process | None = None,
    exchange: str = "float32",
    device: torch.device = CPU,
    stream: Any = None,
) -> TrainStep:
    torch.manual_seed(0)
    model = VisionTransformer(
        8, 4, num_classes=5, embed_dim=16, depth=2, num_heads=2, drop_path_rate=0.5
    )
    model.patch_drop_rate = 0.5
    with CaptureHooks(), on_stream(stream):
        wrapped = wrap_model(model.to(device).train(), process or Process(), exchange=exchange)
    return TrainStep(
        wrapped,
        create_optimizer(optimizer, model, lr=1e-2, weight_decay=0.1),
        lambda step: 1 / (1 + step),
        precision=precision,
        clip_grad=0.5,
        ema_decay=0.9,
        grad_accum_steps=2,
        capture_stream=stream,
    )


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [("muon", "bfloat16"), ("adamw", "float16"), ("sgd", "float32")],
)
def test_captured_steps_equal_the_eager_ones(clock: Clock, optimizer: str, precision: str) -> None:
    """Random numbers, rates that change, clipping, the average, the loss scale, and a batch whose
    gradients are not finite."""
    eager, captured = (build_step(optimizer, precision=precision) for _ in range(2))
    run = captured.run_on_device

    def run_slowly(images: Tensor, targets: Tensor) -> Any:
        clock.start_kernels(launch=1.0, run=0.2)
        return run(images, targets)

    captured.graphs = StepGraphs(run_slowly, captured.optimizer, CPU)
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        images = torch.randn(16, 3, 8, 8, generator=generator)
        labels = torch.randint(5, (16,), generator=generator)
        if number == 8:
            images[0, 0, 0, 0] = float("inf")
        results = []
        for step in (eager, captured):
            torch.manual_seed(number)
            results.append(step(images, labels))
        for value, expected in zip(*results, strict=True):
            assert torch.equal(value, expected) or number == 8
    (kind,) = captured.graphs._kinds.values()
    assert kind.graph is not None
    expected_state = flatten(eager.state_dict())
    state = flatten(captured.state_dict())
    assert state.keys() == expected_state.keys()
    assert [name for name in state if not torch.equal(state[name], expected_state[name])] == []


def test_only_our_models_on_a_gpu_are_captured() -> None:
    step = build_step("muon", precision="float32")
    assert step.graphs is None


# of rank 1, whose clock alone would not have its steps captured
CASES: dict[str, dict[str, Any]] = {
    "a slow host in one": {},
    "no exchange of times": {},
    "a slow replay in one": {"replay": 1.5},
    "the forward pass fails": {"fails": "images"},
    # that of the second micro-batch, in which gradients are exchanged
    "the backward pass fails": {"fails": "weights", "at": 2},
    "the update fails": {"fails": "update"},
    "one has no memory": {"fails": "images", "error": torch.OutOfMemoryError},
}
NUM_STEPS = 18


def _train_in_two(directory: Path, name: str, optimizer: str, precision: str) -> None:
    """Train with graphs and without them, in a process that is one of two."""
    with join_processes("cpu") as (process, _), pytest.MonkeyPatch.context() as monkeypatch:
        clock = pretend(Clock(), monkeypatch)
        exchange_alone()
        case = CASES[name] if process.rank == 1 else {}
        count = ExchangeCount()
        with count:
            exchange = "bfloat16" if precision == "bfloat16" else "float32"
            eager, captured = (
                build_step(optimizer, precision=precision, process=process, exchange=exchange)
                for _ in range(2)
            )
        replay_step = StepGraph.replay
        ways: list[str] = []

        calls_in_capture: list[object] = []

        def fail(*_: object) -> None:
            if not PretendGraph.is_captured():
                return
            calls_in_capture.append(None)
            if len(calls_in_capture) >= case.get("at", 1):
                raise case.get("error", RuntimeError)("operation not permitted")

        def run(images: Tensor, targets: Tensor) -> Any:
            ways.append("eager")
            clock.start_kernels(launch=0.1 if process.rank else 1.0, run=0.3)
            return captured.run_on_device(images, targets)

        def rehearse(images: Tensor, targets: Tensor) -> Any:
            ways.append("rehearsal")
            return captured.rehearse(images, targets)

        def replay(graph: StepGraph, *batch: Tensor) -> Any:
            ways.append("replay")
            clock.start_kernels(launch=case.get("replay", 0.1), run=0.3)
            return replay_step(graph, *batch)

        monkeypatch.setattr(StepGraph, "replay", replay)
        if case.get("fails") == "images":
            captured.module.register_forward_pre_hook(fail)
        if case.get("fails") == "weights":
            captured.module.blocks[1].mlp.fc1.weight.register_hook(fail)
        if case.get("fails") == "update":
            captured.optimizer.register_step_pre_hook(fail)
        if name == "no exchange of times":
            monkeypatch.setattr(step_graphs, "current_process", Process)
        captured.graphs = StepGraphs(run, captured.optimizer, CPU, rehearse=rehearse)

        generator = torch.Generator().manual_seed(process.rank)
        calls = []
        for number in range(2 * NUM_STEPS):
            images = torch.randn(8, 3, 8, 8, generator=generator)
            labels = torch.randint(5, (8,), generator=generator)
            if number == NUM_STEPS:
                captured.load_state_dict(captured.state_dict())
            for step in (eager, captured):
                count.reset()
                torch.manual_seed(number)
                with count:
                    step(images, labels)
            calls.append(count.calls["allreduce_"] + count.calls["_allgather_base_"])
        states = [flatten(step.state_dict()) for step in (eager, captured)]
        result = {
            "captured": captured.graphs.describe()["captured"],
            "ways": ways,
            "calls": calls,
            "unequal": [
                key for key in states[0] if not torch.equal(states[0][key], states[1][key])
            ],
        }
        (directory / f"{process.rank}.json").write_text(json.dumps(result))


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("name", "optimizer", "precision"),
    [
        *((name, "adamw", "float32") for name in CASES),
        ("a slow host in one", "muon", "bfloat16"),
        ("the backward pass fails", "muon", "float16"),
    ],
)
def test_two_processes_capture_their_steps_alike(
    tmp_path: Path, name: str, optimizer: str, precision: str
) -> None:
    """By the largest times of both, and none where one can't; with the weights of a run without
    graphs, to the last bit, in micro-batches, and again after a state is loaded."""
    world = start_world(_train_in_two, tmp_path, name, optimizer, precision, size=2)
    assert join_world(world) == [0, 0]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [result["unequal"] for result in results] == [[], []]
    warm_up = ["eager"] * 12
    expected = {
        "captured": ["rehearsal", "eager"] + ["replay"] * 6,
        "slower": ["rehearsal", "eager"] + ["replay"] * 2 + ["eager"] * 4,
        "fails": ["rehearsal"] + ["eager"] * 6,
        "update": ["rehearsal", "eager"] + ["eager"] * 6,
        "alone": ["eager"] * 6,
    }
    kind = "captured" if "fails" not in CASES[name] else "fails"
    kind = {"a slow replay in one": "slower", "the update fails": "update"}.get(name, kind)
    is_control = name == "no exchange of times"
    kinds = ["captured", "alone"] if is_control else [kind, kind]
    for result, own in zip(results, kinds, strict=True):
        assert result["captured"] == (own == "captured")
        assert result["ways"] == 2 * (warm_up + expected[own])
    # between the times and failures of a measured step, a capture and a measured replay, a step
    # exchanges what it does without graphs
    in_step = results[0]["calls"][0]
    more = [0] * NUM_STEPS
    if not is_control:
        more[11] = 1
        more[12] = 1 if kind == "fails" else 2
        more[13] = 1 if kind in ("captured", "slower") else 0
    assert results[0]["calls"] == results[1]["calls"] == 2 * [in_step + number for number in more]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("backend", "values", "is_chosen"),
    [
        ("cpu:gloo,cuda:nccl", ("0", "0"), True),
        ("cpu:gloo,cuda:nccl", ("0", "1"), False),
        ("cpu:gloo,cuda:nccl", (None, None), False),
        ("cpu:gloo,cuda:gloo", ("0", "0"), False),
    ],
)
def test_processes_capture_where_torchs_conditions_hold_in_each(
    tmp_path: Path, backend: str, values: tuple[str | None, ...], is_chosen: bool
) -> None:
    world = start_world(_choose_stream, tmp_path, backend, values, size=2)
    assert join_world(world) == [0, 0]
    assert {(tmp_path / f"{rank}").read_text() for rank in range(2)} == {
        "stream" if is_chosen else "None"
    }


def _choose_stream(directory: Path, backend: str, values: tuple[str | None, ...]) -> None:
    with join_processes("cpu") as (process, _), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: "stream")
        monkeypatch.setattr(dist, "get_backend_config", lambda: backend)
        os.environ.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
        value = values[process.rank]
        if value is not None:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = value
        stream = choose_capture_stream(process, torch.device("cuda", 0))
        (directory / f"{process.rank}").write_text(str(stream))


def test_the_times_of_ddps_kernels_are_not_read_in_a_later_step() -> None:
    """Of torch's private door: without it, each hundredth step reads events that a graph doesn't have."""
    assert callable(DistributedDataParallel._set_ddp_runtime_logging_sample_rate)
