"""Four machines of one elastic job, each played by a torchrun of its own: killed again and again,
it ends as if nothing had happened."""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.conftest import Launcher
from tests.training.test_distributed import OVERRIDES, assert_close, list_children
from tests.training.test_kill import done_steps

pytestmark = pytest.mark.chaos

RENDEZVOUS = (
    "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=300"
)
PLACE = ("--nnodes=1:4", "--nproc-per-node=1", "--local-addr=127.0.0.1")
PROGRAM = ("-m", "torch.distributed.run", *PLACE, "--max-restarts=100")
LONG = [
    "train.epochs=20",
    "train.checkpoint_every_steps=1",
    "train.batch_size=96",
]  # for 1, 2, 3 and 4 processes
# The gradient of keys' biases is rounding alone (softmax takes no notice of them), and AdamW
# divides by its size: after 260 steps they differ by 3e-4 between numbers of processes, with
# nothing lost. One step moves other weights as far.
LONG += ["model.qkv_bias=false", "optimizer.lr=3e-4"]


def kill(process: int) -> bool:
    """kill -9; whether it was still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
        return True
    return False


@dataclass
class Job:
    """The machines of a job. They meet at a store that none of them holds, as any of them may
    fail."""

    cli: Launcher
    directory: Path
    settings: list[str]
    machines: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        self.log = (self.directory.parent / f"{self.directory.name}.log").open("a")

    def add(self) -> None:
        """Start a machine: it joins the job."""
        meeting = [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self.store.port}",
            "--rdzv-id=job",
        ]
        program = (*PROGRAM, *meeting, f"--rdzv-conf={RENDEZVOUS}", "-m", "vit")
        streams = {
            "stdout": self.log,
            "stderr": self.log,
            "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        }
        arguments = ("train", *self.settings, "--output", str(self.directory), "--resume")
        self.machines.append(self.cli.start(*arguments, program=program, **streams))

    def find_size(self) -> int:
        """Of the running generation, as a process of it was told; 0 between two."""
        for machine in self.machines:
            for process in list_children(machine):
                try:
                    lines = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if sizes := [line for line in lines if line.startswith(b"WORLD_SIZE=")]:
                    return int(sizes[0].partition(b"=")[2])
        return 0

    def kill_process(self, rng: random.Random) -> bool:
        """kill -9 of a rank, which its machine starts again; whether there was one."""
        processes = [process for machine in self.machines for process in list_children(machine)]
        return bool(processes) and kill(rng.choice(processes))

    def kill_machine(self, rng: random.Random) -> None:
        """kill -9 of a torchrun and its rank: the machine is gone."""
        machine = self.machines.pop(rng.randrange(len(self.machines)))
        processes = list_children(machine)
        machine.kill()
        for process in processes:
            kill(process)
        machine.wait()

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 180
        while done_steps(self.directory) < step:
            assert time.monotonic() < deadline, f"no step {step} after three minutes"
            time.sleep(0.01)

    def close(self) -> None:
        for machine in self.machines:
            machine.send_signal(signal.SIGTERM)
        for machine in self.machines:
            machine.wait(60)
        self.log.close()


@pytest.fixture
def job(cli: Launcher, empty_yaml: Path, tmp_path: Path) -> Iterator[Job]:
    settings = [str(empty_yaml), *OVERRIDES, "optimizer.name=adamw", *LONG]
    job = Job(cli, tmp_path / "broken", settings)
    yield job
    job.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_an_elastic_job_survives_20_kills(
    job: Job, cli: Launcher, tmp_path: Path, seed: int
) -> None:
    cli.finish(cli.start("train", *job.settings, "--output", tmp_path / "whole"))
    whole = done_steps(tmp_path / "whole")
    rng, sizes, kills = random.Random(seed), [], 0
    for _ in range(4):
        job.add()
    while kills < 20:
        if rng.random() < 0.7:  # else at any time: while processes start, meet, or restore
            job.wait_for_step(done_steps(job.directory) + 1)
        time.sleep(rng.random() * 0.2)
        sizes.append(job.find_size())
        if len(job.machines) > 2 and rng.random() < 0.4:
            job.kill_machine(rng)
            kills += 1
        else:
            kills += job.kill_process(rng)
            if len(job.machines) < 4 and rng.random() < 0.5:
                job.add()
        print(f"kill {kills}, step {done_steps(job.directory)}, size {sizes[-1]}", flush=True)
    assert done_steps(job.directory) < whole, "killed too late to prove anything"
    assert len(set(sizes) - {0}) >= 3, sizes
    codes = [machine.wait(300) for machine in job.machines]
    assert 0 in codes, codes  # one that came when all was done may say so
    assert_close(tmp_path / "whole", job.directory)
