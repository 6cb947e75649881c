"""Training steps as CUDA graphs.

A step of a small model has about a hundred kernels of a few microseconds each, and the host takes 5
to 10 µs to start one. The replay of a CUDA graph starts all of them at once.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vit.runtime.arguments import first_line

RunStep = Callable[[Tensor, Tensor], Any]  # from images and targets to a named tuple of tensors

# Steps of each kind before one is captured: they compile, choose kernels, make the optimizer's
# state.
_WARM_UP_STEPS = 3


class StepGraphs:
    """Runs the first steps of each kind directly, and the others as replays of a CUDA graph.

    Args:
        run: The step. It reads nothing from the device, and all that it uses except images and
            targets lies at the same addresses each time.
        optimizer: Optimizer of the step.
    """

    def __init__(self, run: RunStep, optimizer: Optimizer) -> None:
        self._run = run
        self._optimizer = optimizer
        self.forget()

    def forget(self) -> None:
        """Free all graphs and start again, because the optimizer's state has moved."""
        self._counts: dict[Hashable, int] = {}
        # kind of steps → replay of their graph, or the step itself if it can't be captured
        self._graphs: dict[Hashable, RunStep] = {}

    def __call__(self, images: Tensor, targets: Tensor, *, settings: Hashable) -> Any:
        """Run a step. `settings` are all values, except images and targets, that decide what the
        step does."""
        kind = (images.shape, targets.shape, targets.dtype, settings)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._counts[kind] <= _WARM_UP_STEPS:
            return self._run(images, targets)
        if kind not in self._graphs:
            try:
                self._graphs[kind] = capture_step(self._run, self._optimizer, images, targets)
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError):
                    warnings.warn(
                        "the training step could not be captured as a CUDA graph"
                        f" ({first_line(error)}); training goes on without it",
                        stacklevel=2,
                    )
                # Nothing was computed, but random numbers may have been drawn.
                torch.manual_seed(torch.initial_seed())
                self._graphs[kind] = self._run
        return self._graphs[kind](images, targets)


def capture_step(run: RunStep, optimizer: Optimizer, images: Tensor, targets: Tensor) -> RunStep:
    """Capture a step, which computes nothing. See `StepGraphs`.

    Returns:
        A function that runs the step on another batch of the same shapes.

    Raises:
        RuntimeError: The step does something that can't be captured, or doesn't fit into memory.
    """
    images, targets = images.clone(), targets.clone()
    graph = torch.cuda.CUDAGraph()
    # torch's AdamW refuses to be captured without this mark, which changes nothing of a fused one,
    # and warns of the mark when it isn't captured.
    groups = [group for group in optimizer.param_groups if group.get("capturable") is False]
    for group in groups:
        group["capturable"] = True
    try:
        with torch.cuda.graph(graph):
            result = run(images, targets)
    finally:
        for group in groups:
            group["capturable"] = False

    def replay(new_images: Tensor, new_targets: Tensor) -> Any:
        images.copy_(new_images)
        targets.copy_(new_targets)
        graph.replay()
        # The next replay overwrites the results.
        return result._make([value.clone() for value in result])

    return replay
