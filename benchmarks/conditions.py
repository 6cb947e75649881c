"""Describe where a result was measured, and write it."""

import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vit.runtime.device import describe_device

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = (
    "albumentations",
    "numpy",
    "Pillow",
    "scikit-learn",
    "scipy",
    "timm",
    "torch",
    "torchvision",
)
# Processors whose names in virtual machines don't tell their generation: (family, models)
_GENERATIONS = {
    "Zen 3": (25, range(16)), "Zen 4": (25, [*range(16, 32), *range(96, 256)]), "Zen 5": (26, range(256)),
    "Sapphire Rapids": (6, [143]), "Granite Rapids": (6, [173]), "Emerald Rapids": (6, [207]),
}  # fmt: skip


def describe_conditions(device: torch.device | str) -> dict[str, Any]:
    """Return the machine, the command, the commit and the versions."""
    device = torch.device(device)
    name = describe_device(device)
    if device.type == "cpu":
        name = name.replace(", ", f", {_name_generation()}, ", 1)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "command": shlex.join(["python", *sys.argv]).replace(f"{ROOT}/", ""),
        "commit": find_commit(),
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


def find_commit() -> str:
    """Return the commit of this checkout, with "-dirty" if files differ from it. Without git, it is
    the value of VIT_COMMIT."""
    if "VIT_COMMIT" in os.environ or shutil.which("git") is None:
        return os.environ.get("VIT_COMMIT", "unknown")
    # results change while they are measured; they are no part of what is measured
    measured = ["--", ":/", ":(top,exclude)benchmarks/results"]
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", *measured], cwd=ROOT, check=False)
    commit = subprocess.run(
        ["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{commit}-dirty" if changed.returncode else commit


def _name_generation() -> str:
    """Return the processor's generation by Linux's numbers for it, or the numbers."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    numbers = [re.search(rf"^{key}\s*: (\d+)$", text, re.M) for key in ("cpu family", "model")]
    family, model = (int(number[1]) if number else 0 for number in numbers)
    for name, (of_family, models) in _GENERATIONS.items():
        if family == of_family and model in models:
            return name
    return f"family {family} model {model}"


def find_result(folder: Path, name: str, machine: Mapping[str, Any]) -> Path:
    """Return the path of the result file NAME-MACHINE.json."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower().removeprefix("cpu")).strip("-")
    return folder / f"{name}-{slug}.json"


def write_result(folder: Path, name: str, result: Mapping[str, Any]) -> Path:
    """Write a result; its "machine" is what `describe_conditions` returned."""
    path = find_result(folder, name, result["machine"])
    path.parent.mkdir(parents=True, exist_ok=True)
    # replaced at once: a process that is stopped leaves the earlier file
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)
    return path


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
