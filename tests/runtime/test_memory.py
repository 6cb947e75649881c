"""Memory that is freed is kept for the next allocation."""

import sys

import pytest

from tests.conftest import Launcher

_COUNT_FAULTS = """
import resource
import torch
from vit.runtime.memory import keep_freed_memory

keep_freed_memory()
values = torch.ones(16 * 2**20)
for _ in range(20):
    values + 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    values + 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_kept_memory_is_not_faulted_in_again(cli: Launcher) -> None:
    faults = cli.finish(cli.start(program=("-c", _COUNT_FAULTS))).out
    assert int(faults) < 50  # pages; without it 163,840 of 4 KiB, or 320 huge ones
