"""Threads that each take a part of a batch on a CPU.

The threads of one operation (OpenMP's) wait for one another at its end, hundreds of times a step:
that takes time, and where another process holds one of them up, it holds up all. Threads that each
take a part of the batch through all operations meet once a step.
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

# Python runs one thread at a time between the operations; more cores share a part's operations
MAX_THREADS = 8
_local = threading.local()


class BatchThreads:
    """Threads among which torch's own are divided.

    Args:
        count: how many; by default one for each of torch's threads, up to 8.
    """

    def __init__(self, count: int | None = None) -> None:
        num_torch_threads = torch.get_num_threads()
        self.count = count or min(num_torch_threads, MAX_THREADS)
        self._torch_threads_each = max(num_torch_threads // self.count, 1)
        self._pool = ThreadPoolExecutor(
            self.count,
            "vit",
            initializer=torch.set_num_threads,
            initargs=(self._torch_threads_each,),
        )

    @contextmanager
    def limit_threads(self) -> Iterator[None]:
        """Let the calling thread's operations use as many of torch's threads as each of these."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._torch_threads_each)
        try:
            yield
        finally:
            # a thread that a program starts later has as many as the last one set
            torch.set_num_threads(before)

    def map(
        self, function: Callable[[Part], Result], parts: Sequence[Part], *, is_random: bool = False
    ) -> Iterator[Result]:
        """function(part) of each part, in order, as they are done.

        Args:
            function: runs in a thread.
            parts: of a batch.
            is_random: whether it takes random numbers from `thread_generator`, which is then seeded
                for each part from torch's generator: the numbers don't depend on which thread is
                first.
        """
        # drawn before any thread starts, in the order of the parts
        seeds: list[int | None] = [None] * len(parts)
        if is_random:
            seeds = torch.randint(2**62, (len(parts),)).tolist()

        def run(part: Part, seed: int | None) -> Result:
            _local.generator = None if seed is None else torch.Generator().manual_seed(seed)
            return function(part)

        with self.limit_threads():
            yield from self._pool.map(run, parts, seeds)


def constant_when_compiled(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, without importing torch's compiler.

    That import took 2 s of the 5 s that every command needed to start (Zen 4).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # private, see its test
    return function


@constant_when_compiled
def thread_generator() -> torch.Generator | None:
    """The random number generator of a thread of `BatchThreads`; elsewhere None, torch's own.

    Threads would take torch's numbers in no certain order.
    """
    return getattr(_local, "generator", None)
