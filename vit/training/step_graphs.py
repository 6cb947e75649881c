"""Training steps as CUDA graphs, for steps whose kernels take the host longer to start than the
device to run.

A step of a small model has about a hundred kernels of a few microseconds each, and the host takes 5
to 10 µs to start one. The replay of a CUDA graph starts all of them at once.
"""

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vit.runtime.arguments import first_line

RunStep = Callable[[Tensor, Tensor], Any]  # from images and targets to a named tuple of tensors

# Steps of each kind before one is measured: they compile, choose kernels, make the optimizer's
# state.
_WARM_UP_STEPS = 3
# Fraction of a step's time from which starting its kernels is considered the bottleneck.
_LAUNCH_FRACTION = 0.8


class StepGraph:
    """A captured step. Capturing computes nothing.

    Args:
        run: The step. It reads nothing from the device, and all that it uses except images and
            targets lies at the same addresses each time.
        optimizer: Optimizer of the step, which has made its state.
        images, targets: A batch; all batches have its shapes.

    Raises:
        RuntimeError: The step does something that can't be captured, or doesn't fit into memory.
    """

    def __init__(self, run: RunStep, optimizer: Optimizer, images: Tensor, targets: Tensor) -> None:
        self._images = images.clone()
        self._targets = targets.clone()
        self._graph = torch.cuda.CUDAGraph()
        with _marked_capturable(optimizer), torch.cuda.graph(self._graph):
            self._result = run(self._images, self._targets)

    def replay(self, images: Tensor, targets: Tensor) -> Any:
        """Run the step on another batch."""
        self._images.copy_(images)
        self._targets.copy_(targets)
        self._graph.replay()
        # The next replay overwrites the results.
        return self._result._make([value.clone() for value in self._result])


@dataclass
class _Kind:
    """Steps that do the same with batches of one shape.

    Attributes:
        stays_eager: A graph gains nothing, as was measured.
    """

    num_steps: int = 0
    eager_seconds: float | None = None
    graph: StepGraph | None = None
    stays_eager: bool = False


class StepGraphs:
    """Runs steps directly or as replays of a CUDA graph, whichever is faster.

    After three steps the next one is measured. If starting its kernels took most of its time, the
    step is captured, and the second replay is measured. The faster way stays.

    Args:
        run: The step. See `StepGraph`.
        optimizer: Optimizer of the step.
        device: A GPU.
    """

    def __init__(self, run: RunStep, optimizer: Optimizer, device: torch.device) -> None:
        self._run = run
        self._optimizer = optimizer
        self._device = device
        self._kinds: dict[Hashable, _Kind] = {}

    def forget(self) -> None:
        """Start again, because the optimizer's state has moved."""
        self._kinds.clear()

    def __call__(self, images: Tensor, targets: Tensor, *, settings: Hashable) -> Any:
        """Run a step.

        Args:
            images, targets: A batch.
            settings: All other values that decide what the step does.
        """
        key = (images.shape, targets.shape, targets.dtype, settings)
        kind = self._kinds.setdefault(key, _Kind())
        kind.num_steps += 1
        if kind.stays_eager or kind.num_steps <= _WARM_UP_STEPS:
            return self._run(images, targets)

        if kind.eager_seconds is None:
            result, launch_seconds, kind.eager_seconds = self._measure(self._run, images, targets)
            kind.stays_eager = launch_seconds < _LAUNCH_FRACTION * kind.eager_seconds
            return result

        if kind.graph is None:
            # The first replay also copies the graph to the device.
            return self._capture(kind, images, targets)

        if kind.num_steps == _WARM_UP_STEPS + 3:
            result, _, seconds = self._measure(kind.graph.replay, images, targets)
            if seconds >= kind.eager_seconds:
                kind.graph = None
                kind.stays_eager = True
            return result
        return kind.graph.replay(images, targets)

    def _capture(self, kind: _Kind, images: Tensor, targets: Tensor) -> Any:
        """Capture steps of this kind, and run one; without a graph if capturing fails."""
        try:
            kind.graph = StepGraph(self._run, self._optimizer, images, targets)
        except RuntimeError as error:
            kind.stays_eager = True
            if not isinstance(error, torch.OutOfMemoryError):
                warnings.warn(
                    f"the training step could not be captured as a CUDA graph ({first_line(error)});"
                    " training goes on without it",
                    stacklevel=2,
                )
        if kind.graph is not None:
            return kind.graph.replay(images, targets)
        # Nothing was computed, but random numbers may have been drawn.
        torch.manual_seed(torch.initial_seed())
        return self._run(images, targets)

    def _measure(self, run: RunStep, images: Tensor, targets: Tensor) -> tuple[Any, float, float]:
        """Return the result of a step, and the seconds until the host has started all kernels and
        until the device has run them. The host waits for it."""
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        result = run(images, targets)
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return result, launched - start, time.perf_counter() - start


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
