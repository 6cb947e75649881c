"""Which process the others wait for."""

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from vit.runtime.processes import Process

T = TypeVar("T")
_RATIO, _SHARE = 1.2, 0.1  # who takes longer than the median so many times, and by such a share of a step, is slow


class Timer:
    """Host seconds between `start` and `stop`, added up."""

    def __init__(self) -> None:
        self.seconds = self._started_at = 0.0

    def start(self, *_: object) -> None:
        """Also as a hook before a forward pass."""
        self._started_at = time.perf_counter()

    def stop(self, *_: object) -> None:
        """Also as a hook after one."""
        self.seconds += time.perf_counter() - self._started_at

    def wrap(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function`, timed."""

        def timed(*arguments: Any) -> T:
            self.start()
            result = function(*arguments)
            self.stop()
            return result

        return timed

    def watch(self, blocks: nn.Module) -> None:
        """Time the blocks of a sharded model, which waits for weights between them."""
        for block in blocks.children():
            block.register_forward_pre_hook(self.start)
            block.register_forward_hook(self.stop)


class Stragglers:
    """Finds processes that take longer than the others for their own part of the steps: the batch and the forward pass.
    In the backward pass all wait for the slowest, so there their times are equal."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._slow: set[int] = set()  # at the last check
        self._named: set[int] = set()
        self._checked_at = time.perf_counter()

    def check(self, timer: Timer) -> list[str]:
        """A sentence for each process that is slow for the second time in succession, by the `timer` of each since the
        last check. To be called in all processes."""
        seconds = self.process.gather(timer.seconds)
        usual, now = statistics.median_low(seconds), time.perf_counter()
        least = max(_RATIO * usual, usual + _SHARE * (now - self._checked_at))
        found = {rank for rank, own in enumerate(seconds) if own > least}
        new = sorted((found & self._slow) - self._named)
        self._slow, self._named = found, self._named.union(new)
        self._checked_at, timer.seconds = now, 0.0
        return [
            f"process {rank} of {len(seconds)} is slow: its batches and forward passes take "
            f"{seconds[rank] / usual:.1f} times as long as the others' (median), and all wait for it"
            for rank in new
        ]
