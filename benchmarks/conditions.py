"""What every result says about where it was measured, and where it is written."""

import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F

from vit.runtime.device import Precision, choose_precision, describe_device

# generations of processors whose names in virtual machines don't tell them: (family, models)
_GENERATIONS = {
    "Zen 5": (26, range(256)), "Zen 4": (25, [*range(16, 32), *range(96, 256)]), "Sapphire Rapids": (6, [143]),
    "Emerald Rapids": (6, [207]), "Granite Rapids": (6, [173]),
}  # fmt: skip

ROOT = Path(__file__).parents[1]
_VERSIONED_PACKAGES = (
    "albumentations", "numpy", "Pillow", "pydantic", "scikit-learn", "scipy", "timm", "torch", "torchvision",
    "triton", "vit-pipeline",
)  # fmt: skip


def describe_conditions(device: torch.device | str) -> dict[str, Any]:
    """Machine, command, commit and versions, as they are now. Of a CPU its rate of products of
    matrices in `vit train`'s precision, of 16,384 tokens of width 192 with 768 × 192 weights, with
    all threads."""
    device = torch.device(device)
    name = describe_device(device)
    if device.type == "cpu":
        name = name.replace(", ", f", {_name_generation()}, ", 1)
    precision = choose_precision("auto", device)
    rates = {}
    if device.type == "cpu":
        rates = {f"{precision}_tflops": _measure_products(precision)}
    return {
        "device": name,
        **rates,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "command": shlex.join(["python", *sys.argv]).replace(f"{ROOT}/", ""),
        "commit": find_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "versions": list_versions(),
    }


def find_commit() -> str:
    """The commit of this checkout, with "-dirty" where files differ from it; where there is no git,
    what VIT_COMMIT says, or "unknown"."""
    if "VIT_COMMIT" in os.environ:
        return os.environ["VIT_COMMIT"]
    if shutil.which("git") is None:
        return "unknown"
    git = partial(
        subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    commit = git(["git", "describe", "--always"]).stdout.strip()
    # results change while they are measured, seed by seed; they are no part of what is measured
    changed = git(
        ["git", "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)benchmarks/results"]
    )
    if changed.returncode == 1:
        return f"{commit}-dirty"
    return commit or "unknown"


def list_versions() -> dict[str, str]:
    """Of the packages that a time or an accuracy may depend on, and of CUDA, cuDNN and the driver
    where there are any."""
    versions = {}
    for name in _VERSIONED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        versions["cudnn"] = str(torch.backends.cudnn.version())
        driver = Path("/proc/driver/nvidia/version")
        if driver.is_file():
            versions["driver"] = driver.read_text().splitlines()[0].strip()
    return versions


def _name_generation() -> str:
    """The processor's generation by Linux's numbers for it, or the numbers."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    found = [
        re.search(rf"^{key}\s*: (\d+)$", text, re.MULTILINE) for key in ("cpu family", "model")
    ]
    family, model = (int(number[1]) if number else 0 for number in found)
    known = [
        name
        for name, (of_family, models) in _GENERATIONS.items()
        if family == of_family and model in models
    ]
    return known[0] if known else f"family {family} model {model}"


@lru_cache
def _measure_products(precision: Precision) -> float:
    """TFLOP/s."""
    tokens, weight = (
        torch.zeros(rows, 192, dtype=getattr(torch, precision)) for rows in (16384, 768)
    )
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        F.linear(tokens, weight)
        seconds.append(time.perf_counter() - start)
    return round(2 * 16384 * 192 * 768 / statistics.median(seconds) / 1e12, 3)


def write_result(folder: Path, name: str, result: Mapping[str, Any]) -> Path:
    """`result`, which holds what `describe_conditions` said under "machine", as
    `<name>-<machine>.json`."""
    path = find_result(folder, name, result["machine"])
    path.parent.mkdir(parents=True, exist_ok=True)
    # at once: a process that is stopped meanwhile leaves the one before
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)
    return path


def find_result(folder: Path, name: str, machine: Mapping[str, Any]) -> Path:
    """Where `write_result` puts it."""
    return folder / f"{name}-{machine_slug(machine['device'])}.json"


def load_result(folder: Path, name: str, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `write_result` wrote there before, if anything."""
    path = find_result(folder, name, machine)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def machine_slug(device: str) -> str:
    """'cpu (AMD EPYC, 2 cores, avx512_bf16)' → 'amd-epyc-2-cores-avx512-bf16'."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("cpu")).strip("-")


def name_processor(device: str) -> str:
    """'cpu (AMD EPYC, Zen 4, 2 cores, avx512_bf16)' → 'AMD EPYC, Zen 4'."""
    return re.sub(r"^cpu \(|, \d+ cores.*", "", device)
