"""The batch script for Slurm in docs/cluster, as far as it goes without a cluster."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from vit.cli.main import app

FOLDER = Path(__file__).parents[1] / "docs" / "cluster"
SLURM = FOLDER / "slurm.sh"
# what stands for Slurm's commands; torchrun is the one of this environment
COMMANDS = {
    "scontrol": '#!/bin/bash\necho "scontrol $*" >> calls\n[ "$1" = show ] && printf "node7\\nnode8\\n" || true\n',
    "scancel": '#!/bin/bash\necho "scancel $*" >> calls\nkill -TERM "$(cat step)"\n',
    "srun": '#!/bin/bash\necho "srun $*" >> calls\nshift\necho $$ > step\nexec "$@"\n',
    "torchrun": f"#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "
    '--local-addr localhost "${@/node7/localhost}"\n',
}
ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node[7-8]"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with Slurm's commands, in which their calls are noted; they come first in
    PATH."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    for key, value in ALLOCATION.items():
        monkeypatch.setenv(key, value)
    return tmp_path


def make_settings(arguments: list[str]) -> dict[str, Any]:
    """The options of `vit train ARGUMENTS`; raises for one that it does not have."""
    group: Any = typer.main.get_command(app)
    return group.commands["train"].make_context("train", list(arguments)).params  # type: ignore[no-any-return]


@pytest.mark.chaos
def test_the_slurm_script_starts_the_run_on_all_nodes(cluster: Path) -> None:
    arguments = ["digits", "--output", "run", "train.device=cpu", "--dry-run"]
    done = subprocess.run(
        ["bash", SLURM, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (cluster / "run" / "first_batch.png").exists()
    first, second = (cluster / "calls").read_text().splitlines()
    assert first == "scontrol show hostnames node[7-8]"
    launcher, train = second.split(" -m vit train ")
    assert launcher == (
        "srun --kill-on-bad-exit=0 torchrun --nnodes 1:1 --nproc-per-node 1 --max-restarts 20 "
        "--rdzv-id 77 --rdzv-backend c10d --rdzv-endpoint node7:29400"
    )
    assert make_settings(train.split())["resume"]


@pytest.mark.chaos
def test_before_its_time_ends_the_slurm_job_saves_and_is_queued_again(cluster: Path) -> None:
    (cluster / "torchrun").write_text(
        "#!/bin/bash\ntrap 'echo saved >> calls; exit 1' TERM\nsleep 30 &\nwait\n"
    )
    job = subprocess.Popen(["bash", SLURM, "digits", "--output", "run"])
    deadline = time.monotonic() + 30
    while not (cluster / "step").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # until the trap is set
    subprocess.run(["kill", "-USR1", str(job.pid)], check=True)
    assert job.wait(timeout=30) == 0
    calls = (cluster / "calls").read_text().splitlines()
    assert calls[2:] == ["scancel --signal=TERM 77", "saved", "scontrol requeue 77"]
