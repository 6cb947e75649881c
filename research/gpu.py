"""What only a GPU can show, in three calls of at most ten minutes each.

    python3 research/gpu.py --call 1 --images IMAGES --wheels WHEELS --output RESULTS
    python3 research/gpu.py --device cpu --small --output RESULTS      # a rehearsal of all calls, in minutes

IMAGES is CIFAR-10 as an image folder (train/ and test/ with a folder for each class), or a tar
archive of one. WHEELS is a folder of wheels (`make wheels`) with what vit needs and the machine
lacks: they are unpacked, so that neither a network nor pip is needed; nor is git, since the folder
names the commit. Parts:

    call 1: tests          tests/cuda, the suite's tests that need a GPU
            parity         losses, logits and maps beside the CPU's, in float32 and bfloat16 (parity.py)
            steps          the GPU recipes' steps: plain, compiled, in a CUDA graph; share of the matmul rate,
                           memory (recipe_steps.py)
    call 2: accuracy       configs/cifar10/speedrun.yaml: seconds to each accuracy (time_to_accuracy.py)
            baseline       timm's model in a plain loop on the same images, for as long (timm_baseline.py)
    call 3: throughput     the training loop beside timm's, from files and from resident images
                           (train_throughput.py)
            attention      attention maps beside vit-explain and pytorch-grad-cam (attention_programs.py)

Each part is a process with its own limit of time, so that one that fails or hangs doesn't take the
others with it, and writes its result after every variant, recipe or epoch, so that what it had is
kept when it is stopped. gpu-<machine>.json says how each one ended. Compiled code is shared between
the parts of a call.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAME = "gpu"
# of a call; its machine takes some seconds more to start and to hand the results over
MINUTES = 9.5
# validation accuracies of CIFAR-10's JPEG copy, which is worth 2 to 3 points less than the original
GOALS = (0.85, 0.90, 0.92)
RECIPES = ("cifar10/speedrun",)
# last lines of a part's output that are kept where it failed
MAX_OUTPUT_LINES = 15
COMMIT_FILE = "COMMIT"


@dataclass(frozen=True)
class Part:
    """A command and the seconds that it may take.

    Args:
        call: the call that it belongs to, from 1.
        limit: seconds; those of a call's parts add up to less than `MINUTES`.
    """

    name: str
    call: int
    limit: float
    command: list[str]


def list_parts(options: argparse.Namespace, images: Path) -> list[Part]:
    """In the order of what one wants to know first. The limits are the sums of what each step takes
    at most, by research/gpu.md's estimates, with the start of each process."""
    builders = (
        _build_tests,
        _build_parity,
        _build_steps,
        _build_accuracy,
        _build_baseline,
        _build_throughput,
        _build_attention,
    )
    parts = [build(options, images) for build in builders]
    if options.small:
        # the rehearsal's CPU may be slow, and it is the commands that are rehearsed, not their time
        parts = [replace(part, limit=3 * part.limit) for part in parts]
    if options.call:
        parts = [part for part in parts if part.call == options.call]
    if options.parts:
        parts = [part for part in parts if part.name in options.parts]
    return parts


def _script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments]


def _build_tests(options: argparse.Namespace, images: Path) -> Part:
    pytest_options = ["-q", "-p", "no:cacheprovider", "--durations=10"]
    if importlib.util.find_spec("xdist"):
        # pytest-benchmark warns beside it, and warnings are errors
        workers = min(6, os.cpu_count() or 1)
        pytest_options += ["-n", str(workers), "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", *pytest_options, "tests/cuda"]
    return Part("tests", call=1, limit=150, command=command)


def _build_parity(options: argparse.Namespace, images: Path) -> Part:
    recipes = list(RECIPES)
    if options.small:
        recipes = recipes[:1]
    output = ["--device", options.device, "--output", str(options.output)]
    # three precisions and devices of 5 steps for each recipe
    return Part("parity", call=1, limit=90, command=_script("parity", *recipes, *output))


def _build_steps(options: argparse.Namespace, images: Path) -> Part:
    recipes = list(RECIPES)
    arguments = ["--seconds", "5"]
    if options.small:
        recipes = recipes[:1]
        arguments = ["--small", "--seconds", "0.1"]
    arguments += ["--device", options.device, "--output", str(options.output)]
    # of each recipe 4 s plain, 50 s compiled with its compilation, 25 s as a graph, whose code is
    # compiled then
    return Part("steps", call=1, limit=320, command=_script("recipe_steps", *recipes, *arguments))


def _list_overrides(options: argparse.Namespace, images: Path) -> list[str]:
    """Of cifar10/speedrun, to be trained on these images."""
    overrides = ["data.name=folder", f"data.root={images}", f"train.device={options.device}"]
    overrides += ["train.evaluate_every_epochs=5"]
    if options.small:
        overrides += ["model.depth=1", "model.embed_dim=32", "model.num_heads=1"]
        overrides += ["model.stem=patch", "train.epochs=2", "train.batch_size=20"]
        overrides += ["train.compile=false", "schedule.warmup_epochs=0"]
        overrides += ["train.evaluate_every_epochs=1", "data.validation_fraction=0.2"]
    return overrides


def _build_accuracy(options: argparse.Namespace, images: Path) -> Part:
    overrides = _list_overrides(options, images)
    arguments = [*overrides, "--seeds", "2", "--output", str(options.output)]
    # a cold run of 140 s, a warm one of 85 s, two evaluations of each
    command = _script("time_to_accuracy", "configs/cifar10/speedrun.yaml", *arguments)
    return Part("accuracy", call=2, limit=330, command=command)


def _build_baseline(options: argparse.Namespace, images: Path) -> Part:
    overrides = _list_overrides(options, images)
    limits = ["--epochs", "1" if options.small else "20", "--seconds", "140"]
    arguments = [*overrides, *limits, "--output", str(options.output)]
    command = _script("timm_baseline", "configs/cifar10/speedrun.yaml", *arguments)
    return Part("baseline", call=2, limit=180, command=command)


def _build_throughput(options: argparse.Namespace, images: Path) -> Part:
    variants = ["plain", "resident", "resident-compiled", "engine", "engine-compiled", "matmul"]
    seconds = "12"
    if options.small:
        variants = ["resident", "engine"]
        seconds = "0.5"
    arguments = [str(images), "--variants", *variants, "--rounds", "1", "--seconds", seconds]
    arguments += ["--device", options.device, "--output", str(options.output)]
    # six processes of 12 s of start and 12 s of steps, two of them with 45 s of compiling; losses
    return Part("throughput", call=3, limit=330, command=_script("train_throughput", *arguments))


def _build_attention(options: argparse.Namespace, images: Path) -> Part:
    arguments = ["--images", str(images), "--count", "64", "--rounds", "3"]
    if options.small:
        arguments = ["--images", str(images), "--count", "2", "--rounds", "1"]
        arguments += ["--models", "ViT at 32 px, 65 tokens"]
    if options.vit_explain:
        arguments += ["--vit-explain", str(options.vit_explain)]
    arguments += ["--device", options.device, "--output", str(options.output)]
    # four variants and up to two programs, 64 images each, three rounds, two models
    return Part("attention", call=3, limit=220, command=_script("attention_programs", *arguments))


def run_part(
    part: Part, *, log: Path, seconds: float, environment: dict[str, str]
) -> dict[str, Any]:
    """Run a part for at most `seconds`; how it ended, and the end of its output where it didn't
    succeed."""
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
        # the processes that it started, too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    ended = f"exit code {code}"
    if code == 0:
        ended = "passed"
    elif code is None:
        ended = "out of time"
    lines = log.read_text(errors="replace").splitlines()
    result: dict[str, Any] = {
        "ended": ended,
        "seconds": round(time.perf_counter() - start, 1),
        "limit": part.limit,
        "last_line": lines[-1] if lines else "",
    }
    if ended != "passed":
        result["output"] = lines[-MAX_OUTPUT_LINES:]
    return result


def run_parts(
    parts: Sequence[Part],
    *,
    minutes: float,
    environment: dict[str, str],
    folder: Path,
    write: Callable[[dict[str, Any]], Any],
) -> None:
    """One part after the other while there is time; `write` gets what is known after each.

    Args:
        minutes: of all parts together.
        environment: of their processes.
        folder: for their output.
    """
    end = time.perf_counter() + 60 * minutes
    results: dict[str, Any] = {}
    for part in parts:
        left = end - time.perf_counter()
        if left < 5:
            results[part.name] = {"ended": "no time left", "seconds": 0.0, "limit": part.limit}
        else:
            log = folder / f"{part.name}.log"
            seconds = min(part.limit, left)
            results[part.name] = run_part(part, log=log, seconds=seconds, environment=environment)
        result = results[part.name]
        print(f"{part.name}: {result['ended']}, {result['seconds']} s", flush=True)
        for line in result.get("output", ()):
            print(f"    {line}", flush=True)
        write(results)


def build_environment(device: str, *, scratch: Path, packages: Path | None) -> dict[str, str]:
    """The variables of the parts' processes: where they find this checkout and `packages`, and the
    caches that they share."""
    paths = [str(ROOT)]
    if packages is not None:
        paths.append(str(packages))
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "VIT_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "compiled"),
        "VIT_TEST_DEVICE": device,
    }


def unpack_wheels(wheels: Path, folder: Path) -> Path:
    """The packages of the wheels in `wheels`, in one folder that Python imports from. A wheel is an
    archive of it, and needs no installation where it has no scripts."""
    packages = folder / "packages"
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    return packages


def list_missing() -> list[str]:
    """What vit needs and isn't installed, or is older: some parts may then fail."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing = []
    for requirement in [*project["dependencies"], "pytest", "beartype"]:
        name, oldest = re.match(r"([\w-]+)(?:>=([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement)
            continue
        if _read_numbers(version) < _read_numbers(oldest or "0"):
            missing.append(f"{requirement} ({version} is installed)")
    return missing


def _read_numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def prepare_images(images: Path | None, folder: Path, *, size: int = 32) -> Path:
    """The image folder: the one that is named, unpacked, or made of noise."""
    if images is not None and images.is_dir():
        return images.resolve()
    target = folder / "images"
    if images is not None:
        with tarfile.open(images) as archive:
            archive.extractall(target, filter="data")
        return next(path.parent for path in sorted(target.rglob("train")) if path.is_dir())

    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 2)):
        for label in range(10):
            class_folder = target / split / f"class {label}"
            class_folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(class_folder / f"{number}.png")
    return target


def build_table(result: dict[str, Any]) -> str:
    """How each part ended."""
    lines = ["| part | ended | seconds |", "|---|---|---|"]
    for name, part in result["parts"].items():
        lines.append(f"| {name} | {part['ended']} | {part['seconds']:.0f} |")
    machine = result["machine"]
    conditions = f"{machine['device']}, torch {machine['torch']}, commit {machine['commit']}."
    return "\n".join([*lines, "", conditions])


def build_tables(load: Callable[[str], dict[str, dict[str, Any]]]) -> str:
    """What is measured on GPUs; `load` gives the results of a kind."""
    import parity
    import recipe_steps

    blocks = [build_table(result) for result in load(NAME).values()]
    for result in load("recipe-cifar10-speedrun").values():
        runs = list(result["runs"])
        if "unfinished" in result:
            runs.append(result["unfinished"])
        blocks += [_describe_run(run, result["machine"]) for run in runs]
    for result in load("timm-baseline").values():
        if not result["machine"]["device"].startswith("cpu"):
            blocks.append(_describe_baseline(result))
    blocks += [recipe_steps.build_tables(result) for result in load(recipe_steps.NAME).values()]
    for result in load("train-throughput").values():
        if not result["machine"]["device"].startswith("cpu"):
            blocks.append(_build_throughput_table(result))
    blocks += [parity.build_tables(result) for result in load(parity.NAME).values()]
    return "\n\n".join(blocks) or "Not measured yet."


def _describe_run(run: dict[str, Any], machine: dict[str, Any]) -> str:
    """Seconds to each goal; of a run that was stopped, as far as it came."""
    from time_to_accuracy import time_to

    reached = [f"{goal:.0%} after {time_to(run['curve'], goal) or '–'} s" for goal in GOALS]
    last = run["curve"][-1]
    result = (
        f"stopped after epoch {last['epoch']}, with {last['top1']:.1%} after {last['seconds']} s"
    )
    if "test_top1" in run:
        result = f"test {run['test_top1']:.1%}"
    return (
        f"`cifar10/speedrun` on CIFAR-10 (JPEG copy), seed {run['seed']}, {machine['device']}: "
        f"validation {', '.join(reached)} from process start; {result}."
    )


def _describe_baseline(result: dict[str, Any]) -> str:
    """timm's model in a plain loop on the same images."""
    run = result["run"]
    last = run["curve"][-1]
    return (
        f"timm's model of the same width and depth in a plain loop, with a DataLoader of "
        f"12 workers: validation {last['top1']:.1%} after {last['seconds']} s and {run['epochs']} "
        f"epochs, test {run['test_top1']:.1%}."
    )


def _build_throughput_table(result: dict[str, Any]) -> str:
    lines = ["| training loop | images/s | of the matmul rate |", "|---|---|---|"]
    names = {"resident": "timm's model on resident batches", "engine": "`vit train`"}
    for name, variant in result["variants"].items():
        share = result.get("fraction_of_matmul_rate", {}).get(name)
        shown = "–" if share is None else f"{share:.0%}"
        title = names.get(name, name)
        lines.append(f"| {title} | {variant['images_per_second']:,.0f} | {shown} |")
    return "\n".join([*lines, "", f"{result['images']}; {result['machine']['device']}."])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images", type=Path, help="CIFAR-10 as an image folder, or a tar archive of it"
    )
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="only this call's parts")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--wheels", type=Path, help="a folder of `make wheels`")
    parser.add_argument("--vit-explain", type=Path, help="a checkout of it, to compare with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="tiny models and few steps; images of noise by default"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all parts together")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.images is None and not options.small:
        parser.error("--images names CIFAR-10, a folder or a tar archive; --small needs none")
    if not (options.call or options.parts or options.small):
        parser.error("--call 1, 2 or 3: all parts together take longer than a call")
    options.output = options.output.resolve()
    return options


def main() -> None:
    options = parse_options()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        packages = None
        if options.wheels:
            packages = unpack_wheels(options.wheels, folder)
            # for this process; the parts' are told by PYTHONPATH
            sys.path.insert(0, str(packages))
            os.environ["VIT_COMMIT"] = (options.wheels / COMMIT_FILE).read_text().strip()
        sys.path.insert(0, str(ROOT))
        missing = list_missing()
        if missing:
            print(f"not installed, so some parts may fail: {', '.join(missing)}", flush=True)

        from conditions import describe_conditions, write_result

        machine = describe_conditions(options.device)
        result = {"machine": machine, "small": options.small, "missing": missing}
        # of the calls before, on the same kind of machine
        earlier = load_parts(options.output, machine)

        def write(parts: dict[str, Any]) -> None:
            write_result(options.output, NAME, result | {"parts": earlier | parts})

        images = prepare_images(options.images, folder)
        run_parts(
            list_parts(options, images),
            minutes=options.minutes,
            environment=build_environment(options.device, scratch=folder, packages=packages),
            folder=folder,
            write=write,
        )


def load_parts(output: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """The parts of a result that is there, of the same machine and commit."""
    from conditions import load_result

    result = load_result(output, NAME, machine)
    if result is None or result["machine"]["commit"] != machine["commit"]:
        return {}
    parts: dict[str, Any] = result["parts"]
    return parts


if __name__ == "__main__":
    main()
