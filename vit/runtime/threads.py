"""Threads that each take a part of a batch on a CPU.

The threads of one operation (OpenMP's) wait for one another at its end, hundreds of times a step: that takes time, and
where another process holds one of them up, it holds up all. Threads that each take a part of the batch through all
operations meet once a step.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from vit.runtime.compiler import constant_when_compiled

Part = TypeVar("Part")
Result = TypeVar("Result")
_MOST_THREADS = 8  # Python runs one thread at a time between the operations; more cores share a part's operations
_local = threading.local()


class BatchThreads:
    """`count` threads, by default one for each of torch's up to 8, that divide torch's threads among them."""

    def __init__(self, count: int | None = None) -> None:
        available = torch.get_num_threads()
        self.count = count or min(available, _MOST_THREADS)
        self._each = max(available // self.count, 1)
        self._pool = ThreadPoolExecutor(self.count, "vit", initializer=torch.set_num_threads, initargs=(self._each,))

    @contextmanager
    def take_share(self) -> Iterator[None]:
        """Let the calling thread's operations take no more of torch's threads than each of these has."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._each)
        try:
            yield
        finally:  # a thread that a program starts later has as many as the last one set
            torch.set_num_threads(before)

    def map(
        self, function: Callable[[Part], Result], parts: Sequence[Part], *, is_random: bool = False
    ) -> Iterator[Result]:
        """function(part) of each, in order, as they are done. Where it `is_random`, seeds are drawn from torch's
        generator, one for each part's `thread_generator`: its numbers don't depend on which thread is first."""
        seeds = torch.randint(2**62, (len(parts),)).tolist() if is_random else [None] * len(parts)

        def run(part: Part, seed: int | None) -> Result:
            _local.generator = None if seed is None else torch.Generator().manual_seed(seed)
            return function(part)

        with self.take_share():
            yield from self._pool.map(run, parts, seeds)


@constant_when_compiled
def thread_generator() -> torch.Generator | None:
    """Where a thread of `BatchThreads` takes its random numbers from; elsewhere None, torch's own generator: threads
    would take its numbers in no certain order."""
    return getattr(_local, "generator", None)
