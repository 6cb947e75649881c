"""Processes that torchrun restarts find each other, not the ones that have ended."""

import os
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

pytestmark = pytest.mark.chaos

PROCESS = """
import os, sys, time
import torch
import torch.distributed as dist
from vit.runtime.processes import join_processes

time.sleep(float(sys.argv[1]))  # what was said before the restart is there to be read meanwhile
with join_processes("cpu"):
    value = torch.ones(1)
    dist.all_reduce(value)
    print(int(value), end="", flush=True)
    os._exit(0)  # as one that is killed
"""


def test_processes_started_again_do_not_call_those_that_are_gone() -> None:
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True
    )  # torchrun's
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
    }
    environment |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": "1",
        "OMP_NUM_THREADS": "1",
    }
    for restart in range(2):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(rank * restart * 3)],
                env=environment | {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(restart)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        assert [process.communicate(timeout=120)[0] for process in processes] == ["2", "2"]
