"""What only a GPU can show, in ten minutes on one H100: `make gpu`.

    python benchmarks/gpu.py --images IMAGES --output benchmarks/results
    python benchmarks/gpu.py --device cpu --small --output FOLDER      # a rehearsal, in which nothing is large

IMAGES is CIFAR-10 as an image folder (train/ and test/ with a folder for each class), or a tar
archive of one. Parts:

    tests          the suite's tests of devices
    parity         losses, logits and maps beside the CPU's, in float32 and bfloat16 (parity.py)
    steps          the GPU recipes' steps: plain, compiled, in a CUDA graph; share of the matmul rate, memory
                   (recipe_steps.py)
    accuracy       configs/cifar10/speedrun.yaml: seconds to 90 and 94 % (time_to_accuracy.py)
    throughput     the training loop beside timm's plain and compiled ones (train_throughput.py)
    attention      attention maps beside vit-explain and pytorch-grad-cam (attention_programs.py)

Each part is a process with its own limit of time, so that one that fails or hangs doesn't take the
others with it. Results are written as each part ends, and gpu-<machine>.json says how each one
ended.
"""

import argparse
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
NAME = "gpu"
MINUTES = 9.5
GOALS = (0.90, 0.94)
RECIPES = ["cifar10/speedrun", "cifar10/best", "imagenette/gpu"]
ENDS = 15  # last lines of what a part said that are kept where it failed


@dataclass(frozen=True)
class Part:
    """A command and the seconds that it may take."""

    name: str
    limit: float
    command: list[str]


def list_parts(options: argparse.Namespace, images: Path) -> list[Part]:
    """In the order of what one wants to know first."""
    small, on_device = options.small, ["--device", options.device]
    written = ["--output", str(options.output)]
    accuracy = ["data.name=folder", f"data.root={images}", f"train.device={options.device}"]
    accuracy += ["train.evaluate_every_epochs=5", "train.attention_maps=0"]
    explain = ["--vit-explain", str(options.vit_explain)] if options.vit_explain else []
    recipes, rounds = RECIPES, ["--rounds", "1", "--seconds", "12"]
    variants = ["--variants", "plain", "compiled", "engine", "engine-compiled", "matmul"]
    if small:
        recipes, rounds, variants = (
            RECIPES[:1],
            ["--rounds", "1", "--seconds", "0.5"],
            ["--variants", "engine"],
        )
        accuracy += ["model.depth=1", "model.embed_dim=32", "model.num_heads=1", "model.stem=patch"]
        accuracy += [
            "train.epochs=1",
            "train.batch_size=20",
            "train.compile=false",
            "schedule.warmup_epochs=0",
        ]
        accuracy += ["train.evaluate_every_epochs=1", "data.validation_fraction=0.2"]

    def script(name: str, *arguments: str) -> list[str]:
        return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments, *written]

    tests = ["tests/runtime/test_device.py"]
    if not small:
        tests += [
            "tests/training/test_graphs.py",
            *sorted(
                path.relative_to(ROOT).as_posix()
                for path in ROOT.glob("tests/runtime/test_on_device_*.py")
            ),
        ]
    parity, steps = (recipes[:1], ["--small", "--seconds", "0.1"]) if small else ([], [])
    images_of_maps = [
        "--images",
        str(images),
        "--count",
        "2" if small else "64",
        "--rounds",
        "1" if small else "3",
    ]
    models = ["--models", "ViT at 32 px, 65 tokens"] if small else []
    found = [
        Part(
            "tests",
            70,
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        ),
        Part("parity", 50, script("parity", *parity, *on_device)),
        Part("steps", 130, script("recipe_steps", *recipes, *steps, *on_device)),
        Part(
            "accuracy",
            130,
            script("time_to_accuracy", "configs/cifar10/speedrun.yaml", *accuracy, "--seeds", "1"),
        ),
        Part(
            "throughput",
            120,
            script("train_throughput", str(images), *variants, *rounds, *on_device),
        ),
        Part(
            "attention",
            60,
            script("attention_programs", *images_of_maps, *models, *explain, *on_device),
        ),
    ]
    return [part for part in found if not options.parts or part.name in options.parts]


def run_part(
    part: Part, *, log: Path, seconds: float, environment: dict[str, str]
) -> dict[str, Any]:
    """Run a part for at most `seconds`; how it ended, and the end of what it said where it didn't
    succeed."""
    start = time.perf_counter()
    with log.open("w") as said:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):  # what it started, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    ended = "passed" if code == 0 else "out of time" if code is None else f"exit code {code}"
    found: dict[str, Any] = {
        "ended": ended,
        "seconds": round(time.perf_counter() - start, 1),
        "limit": part.limit,
    }
    if ended != "passed":
        found["said"] = log.read_text(errors="replace").splitlines()[-ENDS:]
    return found


def run_parts(
    parts: Sequence[Part],
    *,
    minutes: float,
    device: str,
    folder: Path,
    write: Callable[[dict[str, Any]], Any],
) -> None:
    """One part after the other while there is time; `write` gets what is known after each."""
    end, found = time.perf_counter() + 60 * minutes, {}
    environment = os.environ | {"VIT_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    environment["VIT_TEST_DEVICE"] = device  # what the tests of devices run on
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    for part in parts:
        left = end - time.perf_counter()
        if left < 5:
            found[part.name] = {"ended": "no time left", "seconds": 0.0, "limit": part.limit}
        else:
            log = folder / f"{part.name}.log"
            found[part.name] = run_part(
                part, log=log, seconds=min(part.limit, left), environment=environment
            )
        print(
            f"{part.name}: {found[part.name]['ended']}, {found[part.name]['seconds']} s", flush=True
        )
        for line in found[part.name].get("said", ()):
            print(f"    {line}", flush=True)
        write(found)


def list_missing() -> list[str]:
    """What vit needs and isn't installed, or is older: some parts may then fail."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    missing = []
    for requirement in [*wanted, "pytest", "beartype"]:
        name, oldest = re.match(r"([\w-]+)(?:>=([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
            continue
        numbers = [
            [int(part) for part in re.findall(r"\d+", text)[:3]]
            for text in (version, oldest or "0")
        ]
        if numbers[0] < numbers[1]:
            missing.append(f"{requirement} ({version} is installed)")
    return missing


def prepare_images(given: Path | None, folder: Path, *, size: int = 32) -> Path:
    """The image folder: as it was given, unpacked, or made of noise."""
    if given is not None and given.is_dir():
        return given.resolve()
    images = folder / "images"
    if given is not None:
        with tarfile.open(given) as archive:
            archive.extractall(images, filter="data")
        return next(path.parent for path in sorted(images.rglob("train")) if path.is_dir())
    rng = np.random.default_rng(0)
    for split, label in ((split, label) for split in ("train", "test") for label in range(10)):
        place = images / split / f"class {label}"
        place.mkdir(parents=True)
        for number in range(12 if split == "train" else 2):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    return images


def build_table(result: dict[str, Any]) -> str:
    """How each part ended."""
    lines = ["| part | ended | seconds |", "|---|---|---|"]
    lines += [
        f"| {name} | {part['ended']} | {part['seconds']:.0f} |"
        for name, part in result["parts"].items()
    ]
    machine = result["machine"]
    return "\n".join(
        [*lines, "", f"{machine['device']}, torch {machine['torch']}, commit {machine['commit']}."]
    )


def build_tables(load: Callable[[str], dict[str, dict[str, Any]]]) -> str:
    """What is measured on GPUs; `load` gives the results of a kind."""
    import parity
    import recipe_steps
    from time_to_accuracy import time_to

    blocks = [build_table(result) for result in load(NAME).values()]
    for result in load("recipe-cifar10-speedrun").values():
        for run in result["runs"]:
            reached = [f"{goal:.0%} after {time_to(run['curve'], goal) or '–'} s" for goal in GOALS]
            machine = f"`cifar10/speedrun`, seed {run['seed']}, {result['machine']['device']}"
            blocks.append(
                f"{machine}: validation {', '.join(reached)} from process start; test {run['test_top1']:.1%}."
            )
    blocks += [recipe_steps.build_tables(result) for result in load(recipe_steps.NAME).values()]
    for result in load("train-throughput").values():
        if not result["machine"]["device"].startswith("cpu"):
            lines = ["| training loop | images/s | of the matmul rate |", "|---|---|---|"]
            for name, of in result["variants"].items():
                share = result.get("fraction_of_matmul_rate", {}).get(name)
                lines.append(
                    f"| {name} | {of['images_per_second']:,.0f} | {'–' if share is None else f'{share:.0%}'} |"
                )
            blocks.append(
                "\n".join([*lines, "", f"{result['images']}; {result['machine']['device']}."])
            )
    blocks += [parity.build_tables(result) for result in load(parity.NAME).values()]
    return "\n\n".join(blocks) or "Not measured yet."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=Path, help="CIFAR-10 as an image folder, or a tar archive of it"
    )
    parser.add_argument("--vit-explain", type=Path, help="a checkout of it, to compare with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="tiny models and few steps; images of noise by default"
    )
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.images is None and not options.small:
        parser.error("--images names CIFAR-10, a folder or a tar archive; --small needs none")
    missing = list_missing()
    if missing:
        print(f"not installed, so some parts may fail: {', '.join(missing)}", flush=True)
    sys.path.insert(0, str(ROOT))  # where vit isn't installed
    from conditions import describe_conditions, write_result

    from vit.runtime.device import choose_device

    options.output = options.output.resolve()
    result: dict[str, Any] = {
        "machine": describe_conditions(choose_device(options.device)),
        "small": options.small,
    }

    def write(parts: dict[str, Any]) -> None:
        write_result(options.output, NAME, result | {"missing": missing, "parts": parts})

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        images = prepare_images(options.images, folder)
        limits: dict[str, Any] = {"minutes": options.minutes, "device": options.device}
        run_parts(list_parts(options, images), folder=folder, write=write, **limits)


if __name__ == "__main__":
    main()
