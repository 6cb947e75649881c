"""The pretend device for the tests named `test_on_device_…`; commands take it as "npu" for as
long."""

import collections
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.pretend_device import pretend_device


class Count(NamedTuple):
    """Transfers and waits."""

    copies_in: int
    copies_out: int
    waits: int


Counter = collections.Counter[str]


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """`--device npu` and `train.device=npu` work while the test runs; gives what was transferred,
    by line.

    Where code chooses by the kind of device, a CPU gets meanwhile what other devices get, so that
    the results of the two can be the same to the last bit: the same attention kernel, and batches
    that are not divided among threads."""
    from vit import api  # noqa: F401  (and with it all that choose a device)
    from vit.model import attention
    from vit.runtime.device import choose_device
    from vit.training import automatic, run  # noqa: F401

    def choose(name: str) -> torch.device:
        return torch.device("npu", 0) if name == "npu" else choose_device(name)

    for name, module in list(sys.modules.items()):
        if name.startswith("vit.") and hasattr(module, "choose_device"):
            monkeypatch.setattr(module, "choose_device", choose)
    monkeypatch.setattr(attention, "choose_backend", lambda *_: "fused")
    monkeypatch.setattr(run, "BatchThreads", lambda: None)
    with pretend_device() as counter, sdpa_kernel(SDPBackend.MATH):
        yield counter


class Meter:
    """Counts between two calls of `read`, and keeps the lines of the last."""

    def __init__(self, counter: Counter) -> None:
        self.counter, self.before, self.lines = counter, Counter(counter), Counter()

    def read(self) -> Count:
        self.lines, self.before = self.counter - self.before, Counter(self.counter)
        return Count(
            *(sum(n for line, n in self.lines.items() if line.startswith(kind)) for kind in _KINDS)
        )


_KINDS = ("host→device", "device→host", "wait")


@pytest.fixture
def meter(npu: Counter) -> Meter:
    return Meter(npu)


@pytest.fixture
def table() -> Callable[[str, Count], None]:
    """table(what, count) prints what was counted; to be seen with `pytest -s`."""
    return lambda what, count: print(f"\n| {what} | {' | '.join(map(str, count))} |", end="")
