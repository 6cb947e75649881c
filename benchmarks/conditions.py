"""What every result says about where it was measured, and where it is written."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch

from vit.runtime.device import describe_device


def describe_conditions(device: torch.device | str) -> dict[str, Any]:
    """Machine, command, commit and versions, as they are now."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "device": describe_device(torch.device(device)),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }


def write_result(folder: Path, name: str, result: Mapping[str, Any]) -> Path:
    """`result`, which holds what `describe_conditions` said under "machine", as `<name>-<machine>.json`."""
    path = find_result(folder, name, result["machine"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def find_result(folder: Path, name: str, machine: Mapping[str, Any]) -> Path:
    """Where `write_result` puts it."""
    return folder / f"{name}-{machine_slug(machine['device'])}.json"


def machine_slug(device: str) -> str:
    """'cpu (AMD EPYC, 2 cores, avx512_bf16)' → 'amd-epyc-2-cores-avx512-bf16'."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("cpu")).strip("-")
