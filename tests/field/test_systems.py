"""Windows and macOS, rehearsed: without the modules and functions that they lack, and with worker
processes that begin anew (the start method "spawn"). CI also runs this there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, save_noise

# What only Linux has. Python runs it before any program, also in processes that a program starts.
SITE = """
import builtins, io, multiprocessing, os, sys

for name in ("posix_fallocate", "sched_getaffinity", "pread", "O_NONBLOCK"):
    if hasattr(os, name):
        delattr(os, name)

def forbid(original):
    def open(file, *args, **kwargs):
        caller = sys._getframe(1)
        while caller is not None and caller.f_globals["__name__"].startswith(("pathlib", "io")):
            caller = caller.f_back
        name = caller.f_globals["__name__"] if caller is not None else ""
        if name.startswith("vit.") and str(file).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "only Linux has it", file)
        return original(file, *args, **kwargs)
    return open

io.open = builtins.open = forbid(io.open)
multiprocessing.set_start_method("spawn")
"""

PROGRAM = """
import json, sys
from pathlib import Path

import vit

def transform(pixels):
    return pixels[:, ::-1]

if __name__ == "__main__":
    photos, folder = map(Path, sys.argv[1:3])
    small = {"data": {"name": "folder", "root": str(photos), "image_size": 16, "pipeline": "workers",
        "workers": 1},
        "model": {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2},
        "train": {"batch_size": 8, "epochs": 2, "device": "cpu", "precision": "float32"}}
    run = vit.train(small, output=folder / "run", transform=transform)
    counts = [run.steps, len(vit.predict(folder / "run", photos / "cat", device="cpu").predictions)]
    counts.append(vit.evaluate(folder / "run", device="cpu").evaluation.num_images)
    result = vit.explain(folder / "run", photos / "cat", output=folder / "maps", device="cpu")
    counts.append(len(result.images))
    print(json.dumps(counts))
"""


@pytest.mark.extended
def test_commands_run_without_what_only_linux_has(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for module in ("fcntl", "resource", "pwd", "grp"):
        (site / f"{module}.py").write_text(f"raise ImportError('no {module}')\n")
    (site / "sitecustomize.py").write_text(SITE)
    (tmp_path / "program.py").write_text(PROGRAM)
    names = [f"{name}/{number:02}.png" for name in ("cat", "dog") for number in range(16)]
    save_noise(tmp_path / "photos", names, size=(16, 16))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "program.py", "photos", "out"]
    outcome = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout) == [6, 16, 6, 16]
