"""Divide a batch on a CPU among threads.

The OpenMP threads of an operation wait for each other at its end, hundreds of times in each step.
That takes time, and if another process delays one of them, all are delayed. Threads that each
compute a part of the batch through all operations wait for each other only once in a step.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., object])

# Python runs only one thread at a time between operations. With more cores than this, several
# cores share the operations of one part.
MAX_THREADS = 8
_local = threading.local()


class BatchThreads:
    """A pool of threads that share torch's own threads equally; by default as many, at most 8."""

    def __init__(self, count: int | None = None) -> None:
        num_torch_threads = torch.get_num_threads()
        self.count = count or min(num_torch_threads, MAX_THREADS)
        self._torch_threads_each = max(num_torch_threads // self.count, 1)
        self._pool = ThreadPoolExecutor(
            self.count, "vit", torch.set_num_threads, (self._torch_threads_each,)
        )

    @contextmanager
    def limit_threads(self) -> Iterator[None]:
        """Limit the calling thread to as many torch threads as a thread of this pool has."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._torch_threads_each)
        try:
            yield
        finally:
            # A thread that a program starts later gets the number that was set last.
            torch.set_num_threads(before)

    def map(
        self, function: Callable[[Part], Result], parts: Sequence[Part], *, is_random: bool = False
    ) -> Iterator[Result]:
        """Yield function(part) for each part of a batch, in order, when it is ready.

        If `is_random`, the function takes random numbers from `thread_generator`, which is seeded
        for each part from torch's generator: they don't depend on which thread is first.
        """
        # The seeds are drawn before any thread starts, in the order of the parts.
        seeds: list[int | None] = [None] * len(parts)
        if is_random:
            seeds = torch.randint(2**62, (len(parts),)).tolist()

        def run(part: Part, seed: int | None) -> Result:
            _local.generator = None if seed is None else torch.Generator().manual_seed(seed)
            return function(part)

        with self.limit_threads():
            yield from self._pool.map(run, parts, seeds)


def constant_when_compiled(function: Function) -> Function:
    """Decorate like `torch.compiler.assume_constant_result`, without importing torch's compiler.

    That import took 2 s of the 5 s in which a command started (Zen 4).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # private, see its test
    return function


@constant_when_compiled
def thread_generator() -> torch.Generator | None:
    """Return the random number generator of a thread of `BatchThreads`; None in other threads.

    Threads would take numbers from torch's generator in an order that differs from run to run.
    """
    return getattr(_local, "generator", None)
