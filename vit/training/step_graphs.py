"""Training steps as CUDA graphs, where the host takes longer to start their kernels than the device to
run them.

A step of a small model is some hundred kernels of a few microseconds each, and the host takes 5 to
10 to start one. The replay of a CUDA graph starts all of them at once.
"""

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from vit.runtime.arguments import first_line

RunStep = Callable[[Tensor, Tensor], Any]  # from images and targets to a named tuple of tensors

# of each kind, before one is measured: they compile, choose kernels, make the optimizer's state
_WARM_UP_STEPS = 3
# of a step's time, from which starting its kernels is taken for what bounds it
_LAUNCH_FRACTION = 0.8


class StepGraph:
    """A step, captured. Capturing computes nothing.

    Args:
        run: the step. It reads nothing from the device, and what it takes and leaves beside images
            and targets lies at the same addresses each time.
        optimizer: of the step, which has made its state.
        images, targets: of the shapes that all batches have.

    Raises:
        RuntimeError: the step does something that can't be captured, or doesn't fit the memory.
    """

    def __init__(self, run: RunStep, optimizer: Optimizer, images: Tensor, targets: Tensor) -> None:
        self._images = images.clone()
        self._targets = targets.clone()
        self._graph = torch.cuda.CUDAGraph()
        with _marked_capturable(optimizer), torch.cuda.graph(self._graph):
            self._result = run(self._images, self._targets)

    def replay(self, images: Tensor, targets: Tensor) -> Any:
        """The step on another batch."""
        self._images.copy_(images)
        self._targets.copy_(targets)
        self._graph.replay()
        # the next replay writes over them
        return self._result._make([value.clone() for value in self._result])


class _Seconds(NamedTuple):
    """How long a step took."""

    launch: float  # until the host had started all of its kernels
    total: float  # until the device had run them


@dataclass
class _Kind:
    """Steps that do the same with batches of one shape."""

    num_steps: int = 0
    eager_seconds: float | None = None
    graph: StepGraph | None = None
    # it was found that a graph gains nothing
    stays_eager: bool = False


class StepGraphs:
    """Runs steps as they are or as replays of a CUDA graph: by the times of two of them.

    After three steps the next one is measured. Where starting its kernels took most of its time, the
    step is captured, and the second replay measured. The faster way stays.

    Args:
        run: as of `StepGraph`.
        optimizer: of the step.
        device: a GPU.
    """

    def __init__(self, run: RunStep, optimizer: Optimizer, device: torch.device) -> None:
        self._run = run
        self._optimizer = optimizer
        self._device = device
        self._kinds: dict[Hashable, _Kind] = {}

    def forget(self) -> None:
        """Begin again, as when the optimizer's state has moved."""
        self._kinds.clear()

    def __call__(self, images: Tensor, targets: Tensor, *, settings: Hashable) -> Any:
        """A step.

        Args:
            images, targets: a batch.
            settings: all else that decides on what the step does.
        """
        key = (images.shape, targets.shape, targets.dtype, settings)
        kind = self._kinds.setdefault(key, _Kind())
        kind.num_steps += 1
        if kind.stays_eager or kind.num_steps <= _WARM_UP_STEPS:
            return self._run(images, targets)

        if kind.eager_seconds is None:
            result, seconds = self._measure(self._run, images, targets)
            kind.eager_seconds = seconds.total
            kind.stays_eager = seconds.launch < _LAUNCH_FRACTION * seconds.total
            return result

        if kind.graph is None:
            # the first replay also brings the graph to the device
            return self._capture(kind, images, targets)

        if kind.num_steps == _WARM_UP_STEPS + 3:
            result, seconds = self._measure(kind.graph.replay, images, targets)
            if seconds.total >= kind.eager_seconds:
                kind.graph = None
                kind.stays_eager = True
            return result
        return kind.graph.replay(images, targets)

    def _capture(self, kind: _Kind, images: Tensor, targets: Tensor) -> Any:
        """Capture steps of this kind, and do one; where that fails, as it is."""
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
        # nothing was computed, but random numbers may have been taken
        torch.manual_seed(torch.initial_seed())
        return self._run(images, targets)

    def _measure(self, run: RunStep, images: Tensor, targets: Tensor) -> tuple[Any, _Seconds]:
        """The result of a step, and the time it takes, for which the host waits."""
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        result = run(images, targets)
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return result, _Seconds(launched - start, time.perf_counter() - start)


@contextmanager
def _marked_capturable(optimizer: Optimizer) -> Iterator[None]:
    """torch's AdamW refuses to be captured without a mark, which changes nothing of a fused one, and
    warns of it when it isn't captured."""
    groups = [group for group in optimizer.param_groups if group.get("capturable") is False]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in groups:
            group["capturable"] = False
