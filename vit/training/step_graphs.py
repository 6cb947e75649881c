"""Training steps as CUDA graphs, for loops that take the host longer than the device.

A step of a small model has about a hundred kernels of a few microseconds each, and the host takes 5
to 10 µs to start one. The replay of a CUDA graph starts all of them at once. Between two steps the
same thread makes the next batch and logs, which counts as well.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from vit.runtime.arguments import first_line
from vit.runtime.processes import Process, current_process

RunStep = Callable[[Tensor, Tensor], Any]  # from images and targets to a named tuple of tensors

# Steps of each kind before one is measured: they compile, choose kernels, make the optimizer's
# state. With DistributedDataParallel torch asks for 11.
_WARM_UP_STEPS = 3
_PARALLEL_WARM_UP_STEPS = 11
# Fraction of a step's time from which the host's part of the loop is considered the bottleneck.
_HOST_FRACTION = 0.8


class StepGraph:
    """A captured step. Capturing computes nothing.

    Args:
        run: The step. It reads nothing from the device, and all that it uses except images and
            targets lies at the same addresses each time.
        optimizer: Optimizer of the step, which has made its state.
        images, targets: A batch; all batches have its shapes.
        stream: Stream in which it is captured, instead of torch's own.

    Raises:
        RuntimeError: The step does something that can't be captured, or doesn't fit into memory.
    """

    def __init__(
        self,
        run: RunStep,
        optimizer: Optimizer,
        images: Tensor,
        targets: Tensor,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._images = images.clone()
        self._targets = targets.clone()
        self._graph = torch.cuda.CUDAGraph()
        with _marked_capturable(optimizer), torch.cuda.graph(self._graph, stream=stream):
            self._result = run(self._images, self._targets)

    def replay(self, images: Tensor, targets: Tensor) -> Any:
        """Run the step on another batch."""
        self._images.copy_(images)
        self._targets.copy_(targets)
        self._graph.replay()
        # The next replay overwrites the results.
        return self._result._make([value.clone() for value in self._result])


class LoopTime(NamedTuple):
    """Seconds of one turn of the training loop.

    Attributes:
        host: Time of the host for a turn: between two steps, and until all kernels are started.
        step: Time from the step's first kernel to its last.
    """

    host: float
    step: float

    @property
    def total(self) -> float:
        """Seconds of a turn: host and device work side by side."""
        return max(self.host, self.step)


@dataclass
class _Kind:
    """Steps that do the same with batches of one shape.

    Attributes:
        between: Least seconds of the host between two of these steps.
        time: The loop with the steps as they run now; None until it is measured.
        stays_eager: A graph gains nothing, as was measured.
    """

    num_steps: int = 0
    between: float = math.inf
    time: LoopTime | None = None
    graph: StepGraph | None = None
    stays_eager: bool = False


class StepGraphs:
    """Runs steps directly or as replays of a CUDA graph, whichever is faster.

    After three steps the next one is measured. If the host needs most of its time for a turn of the
    loop, the step is captured, and the second replay is measured. The faster way stays. Several
    processes decide alike, by the largest times of all; if one can't capture, none does.

    Args:
        run: The step. See `StepGraph`.
        optimizer: Optimizer of the step.
        device: A GPU.
        rehearse: Part of a wrapped model's step that exchanges nothing. It is captured first, because
            NCCL may not work after a capture that fails.
        stream: See `choose_capture_stream`.
    """

    def __init__(
        self,
        run: RunStep,
        optimizer: Optimizer,
        device: torch.device,
        *,
        rehearse: RunStep | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._run = run
        self._optimizer = optimizer
        self._device = device
        self._stream = stream
        self._rehearse = rehearse
        self._process = current_process() if rehearse else Process()
        self._warm_up_steps = _PARALLEL_WARM_UP_STEPS if rehearse else _WARM_UP_STEPS
        self._kinds: dict[Hashable, _Kind] = {}
        # kind of the last step, and the time at which it was started
        self._last: tuple[_Kind | None, float] = (None, 0.0)

    def describe(self) -> dict[str, Any]:
        """Return whether the last steps are replays, and the milliseconds of the host and of the step in
        a turn of the loop; without times until they are measured."""
        kind, _ = self._last
        if kind is None:
            return {}
        described: dict[str, Any] = {"captured": kind.graph is not None}
        if kind.time is not None:
            described["host_milliseconds"] = 1e3 * kind.time.host
            described["step_milliseconds"] = 1e3 * kind.time.step
        return described

    def forget(self) -> None:
        """Free all graphs and start again: the optimizer's state has moved, or NCCL ends, which waits
        for its graphs (https://github.com/pytorch/pytorch/issues/115388)."""
        for kind in self._kinds.values():
            if kind.graph is not None:
                kind.graph._graph.reset()
        self._kinds.clear()
        self._last = (None, 0.0)

    def __call__(self, images: Tensor, targets: Tensor, *, settings: Hashable) -> Any:
        """Run a step.

        Args:
            images, targets: A batch.
            settings: All other values that decide what the step does.
        """
        key = (images.shape, targets.shape, targets.dtype, settings)
        kind = self._kinds.setdefault(key, _Kind())
        last_kind, started_at = self._last
        if kind is last_kind:
            kind.between = min(kind.between, time.perf_counter() - started_at)
        with on_stream(self._stream):
            result = self._run_kind(kind, images, targets)
        self._last = (kind, time.perf_counter())
        return result

    def _run_kind(self, kind: _Kind, images: Tensor, targets: Tensor) -> Any:
        kind.num_steps += 1
        if kind.stays_eager or kind.num_steps <= self._warm_up_steps:
            return self._run(images, targets)

        if kind.time is None:
            result, kind.time = self._measure(kind, self._run, images, targets)
            kind.stays_eager = kind.time.host < _HOST_FRACTION * kind.time.step
            return result

        if kind.graph is None:
            # The first replay also copies the graph to the device.
            return self._capture(kind, images, targets)

        if kind.num_steps == self._warm_up_steps + 3:
            result, replay_time = self._measure(kind, kind.graph.replay, images, targets)
            if replay_time.total < kind.time.total:
                kind.time = replay_time
            else:
                kind.graph = None
                kind.stays_eager = True
            return result
        return kind.graph.replay(images, targets)

    def _capture(self, kind: _Kind, images: Tensor, targets: Tensor) -> Any:
        """Capture steps of this kind, and run one; without a graph if capturing fails."""
        for run in filter(None, (self._rehearse, self._run)):
            # The rehearsal's memory is free again.
            kind.graph = None
            try:
                kind.graph = StepGraph(run, self._optimizer, images, targets, stream=self._stream)
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError):
                    warnings.warn(
                        "the training step could not be captured as a CUDA graph"
                        f" ({first_line(error)}); training goes on without it",
                        stacklevel=2,
                    )
            kind.stays_eager = self._process.any_rank(kind.graph is None)
            if kind.stays_eager:
                kind.graph = None
                break
        if kind.graph is not None:
            return kind.graph.replay(images, targets)
        # Nothing was computed, but random numbers may have been drawn.
        torch.manual_seed(torch.initial_seed())
        return self._run(images, targets)

    def _measure(
        self, kind: _Kind, run: RunStep, images: Tensor, targets: Tensor
    ) -> tuple[Any, LoopTime]:
        """Return the result of a step, and the time of the loop with it. The host waits for the
        device."""
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        result = run(images, targets)
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        between = 0.0 if math.isinf(kind.between) else kind.between
        host, step = between + launched - start, time.perf_counter() - start
        return result, LoopTime(*self._process.largest(host, step))


def choose_capture_stream(process: Process, device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream in which several processes wrap the model and run its steps, so that these can
    be captured; None unless each has NCCL without error handling, as torch asks for
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#usage-with-distributeddataparallel)."""
    if process.world_size == 1 or device.type != "cuda":
        return None
    handles_errors = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0"
    if process.any_rank(handles_errors or "cuda:nccl" not in dist.get_backend_config()):
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run kernels in a stream, after those of the current one and before its next ones."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def _marked_capturable(optimizer: Optimizer) -> Iterator[None]:
    """Mark an optimizer as capturable. torch's AdamW refuses to be captured without the mark, which
    changes nothing of a fused one, and warns of the mark when it isn't captured."""
    groups = [group for group in optimizer.param_groups if group.get("capturable") is False]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False
