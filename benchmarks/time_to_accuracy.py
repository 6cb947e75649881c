"""How long a recipe takes to reach an accuracy, from process start, beside a plain loop of timm's model.

    python benchmarks/time_to_accuracy.py configs/cifar10/cpu.yaml data.name=folder data.root=ROOT --seeds 3 \\
        --baseline timm --baseline-epochs 10 --output benchmarks/results

Ours is `vit train` as users run it, once for each seed: the first starts from empty caches (images are decoded,
code is compiled), the others find them. Its test accuracy is `vit evaluate`'s, of the model chosen on the
validation split, with and without the mirrored image. The baseline is `timm_baseline.py`.

Times are of the wall clock from the start of the process; both include validation. The result is written after every
seed, and after every epoch with the run so far under "unfinished"; with --continue what it has is not run again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conditions import describe_conditions, find_result, write_result

from vit.bundle import load_bundle
from vit.config import Config, load_config
from vit.runtime.device import choose_device

Curve = list[dict[str, float]]


def time_ours(
    recipe: str,
    overrides: list[str],
    *,
    seed: int,
    directory: Path,
    cache: Path,
    mirrored: bool,
    report: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """One run of `vit train`, and `vit evaluate` as it is and, if `mirrored`, with the mirrored
    image; `report` gets what is known after every validation."""
    run, cold = directory / f"seed-{seed}", not cache.exists()
    directory.mkdir(exist_ok=True)
    environment = os.environ | {"VIT_CACHE": str(cache)}
    vit = [sys.executable, "-m", "vit"]
    command = [*vit, "train", recipe, *overrides, f"train.seed={seed}", "--output", str(run)]
    output = directory / f"seed-{seed}.log"
    with output.open("w") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        curve: Curve = []
        for point in watch_validation(process, run / "metrics.jsonl", start):
            curve.append(point)
            report({"seed": seed, "cold": cold, "curve": curve})
        seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"vit train failed: {output.read_text()}")
    accuracy: dict[str, Any] = {}
    evaluations: dict[str, list[str]] = {"test_top1": []}
    if mirrored:
        evaluations["test_top1_mirrored"] = ["--tta", "hflip"]
    for name, options in evaluations.items():
        evaluation = directory / f"seed-{seed}-{name}"
        command = [
            *vit,
            "evaluate",
            str(run),
            *options,
            "--num-examples",
            "0",
            "--output",
            str(evaluation),
        ]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        found = json.loads((evaluation / "evaluation.json").read_text())
        accuracy |= {name: found["top1"], f"{name}_interval": found["intervals"]["top1"]}
    commit = describe_conditions("cpu")["commit"]
    return {
        "seed": seed,
        "commit": commit,
        "cold": cold,
        "seconds": round(seconds, 1),
        **accuracy,
        "curve": curve,
        **list_executions(run / "metrics.jsonl"),
    }


def list_executions(metrics: Path) -> dict[str, Any]:
    """On a GPU, how the steps of each image size were run at last: compiled, captured, milliseconds
    of the host and of the step."""
    names = ("compiled", "captured", "host_milliseconds", "step_milliseconds", "images_per_second")
    found = {}
    for line in metrics.read_text().splitlines():
        logged = json.loads(line)
        if "compiled" in logged:
            size = f"{logged.get('train_image_height', 'data')} px"
            found[size] = {name: logged[name] for name in names if name in logged}
    return {"execution": found} if found else {}


def watch_validation(
    process: subprocess.Popen[Any], metrics: Path, start: float
) -> Iterator[dict[str, float]]:
    """Validation accuracies with the seconds since `start` at which they were written, until the
    process ends."""
    seen = 0
    while process.poll() is None:
        time.sleep(0.2)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        now = round(time.perf_counter() - start, 1)
        for line in lines[seen:]:
            logged = json.loads(line)
            if logged["val_top1"] is not None:  # not every epoch is followed by a validation
                yield {"seconds": now, "epoch": logged["epoch"], "top1": logged["val_top1"]}
        seen = len(lines)


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds; of accuracies the test images' own 95 % interval,
    whose ends are means over the seeds."""
    summary: dict[str, Any] = {"seeds": len(runs)}
    for name in ("test_top1", "test_top1_mirrored", "seconds"):
        values = [run[name] for run in runs if name in run]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else None
            summary[name] = {"mean": statistics.mean(values), "standard_deviation": spread}
        intervals = [run[f"{name}_interval"] for run in runs if f"{name}_interval" in run]
        if intervals:
            summary[name]["interval"] = [
                statistics.mean(ends) for ends in zip(*intervals, strict=True)
            ]
    return summary


def time_to(curve: list[dict[str, float]], top1: float) -> float | None:
    """Seconds until the validation accuracy was first reached."""
    return next((point["seconds"] for point in curve if point["top1"] >= top1), None)


def compare(
    ours: list[dict[str, Any]], baseline: list[dict[str, Any]], top1: float
) -> dict[str, float | bool | None]:
    """Median times to `top1`. A baseline that never reached it has the ratio of the time it was
    given, a bound."""
    reached = [time_to(run["curve"], top1) for run in ours]
    theirs = [time_to(run["curve"], top1) for run in baseline]
    if any(seconds is None for seconds in reached) or not baseline:
        return {"top1": top1, "ours_seconds": None, "baseline_seconds": None, "ratio": None}
    mine = statistics.median(seconds for seconds in reached if seconds is not None)
    other = statistics.median(
        run["curve"][-1]["seconds"] if seconds is None else seconds
        for run, seconds in zip(baseline, theirs, strict=True)
    )
    return {
        "top1": top1,
        "ours_seconds": mine,
        "baseline_seconds": other,
        "baseline_reached_it": None not in theirs,
        "ratio": round(other / mine, 2),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--seeds", type=int, default=3)
    baselines = parser.add_mutually_exclusive_group()
    baselines.add_argument("--baseline", choices=["timm"])
    baselines.add_argument(
        "--baseline-from", type=Path, metavar="RESULT", help="take its runs from this result"
    )
    parser.add_argument("--baseline-seeds", type=int, default=1)
    parser.add_argument("--baseline-epochs", type=int, default=10)
    parser.add_argument(
        "--baseline-seconds", type=float, default=float("inf"), help="stop it after an epoch"
    )
    parser.add_argument("--target", type=float, default=0.75, help="validation top-1 to time")
    parser.add_argument(
        "--continue", action="store_true", dest="goes_on", help="run only what the result lacks"
    )
    parser.add_argument("--without-mirrored", action="store_true", help="evaluate once, not twice")
    parser.add_argument("--cache", type=Path, help="folder of decoded images that stays")
    parser.add_argument("--name", help="of the result; default: the recipe's path")
    parser.add_argument("--output", type=Path, help="folder for the result")
    options = parser.parse_intermixed_args()
    if options.goes_on and options.output is None:
        parser.error("--continue needs --output, the folder of the result")
    return options


def load_earlier(path: Path | None, device: str) -> dict[str, Any]:
    """The result whose baseline is taken, if any: of the same kind of machine."""
    earlier: dict[str, Any] = json.loads(path.read_text()) if path else {}
    if earlier and earlier["machine"]["device"] != device:
        raise SystemExit(f"{path} was measured on {earlier['machine']['device']}, not on {device}")
    return earlier


def run_baseline(options: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    """timm's model in a plain loop, in a process of its own."""
    limits = [
        f"--epochs={options.baseline_epochs}",
        f"--seconds={options.baseline_seconds}",
        f"--seed={seed}",
    ]
    script = Path(__file__).with_name("timm_baseline.py")
    command = [sys.executable, str(script), options.recipe, *options.overrides, *limits]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    run: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return run


def describe_recipe(options: argparse.Namespace, config: Config, run: Path) -> dict[str, Any]:
    """What was trained, and on what."""
    bundle = load_bundle(run)
    return {
        "recipe": options.recipe,
        "overrides": [item for item in options.overrides if not item.startswith("data.root=")],
        "data": {"fingerprint": bundle.data["fingerprint"], "notes": bundle.data["notes"]},
        "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
        "config": describe_config(config),
    }


def describe_config(config: Config) -> dict[str, Any]:
    """Its values, without what is this machine's alone."""
    return config.model_dump(mode="json", exclude={"data": {"root", "cache_dir"}})


def main() -> None:
    options = parse_options()
    config = load_config(Path(options.recipe), options.overrides)
    machine = describe_conditions(choose_device(config.train.device))
    earlier = load_earlier(options.baseline_from, machine["device"])
    name = options.name or options.recipe.removeprefix("configs/").removesuffix(".yaml").replace(
        "/", "-"
    )
    before: dict[str, Any] = {}  # what an earlier call found
    if (
        options.goes_on
        and (path := find_result(options.output, f"recipe-{name}", machine)).exists()
    ):
        before = json.loads(path.read_text())
        if before["config"] != describe_config(config):
            raise SystemExit(f"{path} is of another configuration; leave out --continue")
    ours: list[dict[str, Any]] = before.get("runs", [])
    compared = before if before.get("baseline_runs") else earlier
    baseline: list[dict[str, Any]] = compared.get("baseline_runs", [])
    measured_on = compared.get("baseline_machine") or compared.get("machine")
    result = before | {"baseline_machine": measured_on if baseline else None}
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        cache = options.cache or folder / "cache"
        for seed in range(options.seeds):
            is_new = all(run["seed"] != seed for run in ours)
            if is_new:
                result = result | {"machine": machine, "config": describe_config(config)}

                def report(run: dict[str, Any], result: dict[str, Any] = result) -> None:
                    if options.output:
                        so_far = {"ours": summarise(ours), "runs": ours, "unfinished": run}
                        write_result(options.output, f"recipe-{name}", result | so_far)

                ours.append(
                    time_ours(
                        options.recipe,
                        options.overrides,
                        seed=seed,
                        directory=folder,
                        cache=cache,
                        mirrored=not options.without_mirrored,
                        report=report,
                    )
                )
                result = (
                    result
                    | describe_recipe(options, config, folder / f"seed-{seed}")
                    | {"machine": machine}
                )
                print(
                    f"seed {seed}: { {k: v for k, v in ours[-1].items() if k != 'curve'} }",
                    flush=True,
                )
            if options.baseline and len(baseline) < options.baseline_seeds:
                baseline.append(run_baseline(options, seed=seed))
                result = result | {"baseline_machine": machine}
            elif not is_new:
                continue
            result = result | {
                "ours": summarise(ours),
                "baseline": summarise(baseline) if baseline else None,
                "time_to": compare(ours, baseline, options.target),
                "runs": ours,
                "baseline_runs": baseline,
            }
            if options.output:  # after every run: the next one may be cut off
                print(write_result(options.output, f"recipe-{name}", result))
    print(json.dumps({key: result[key] for key in ("ours", "baseline", "time_to")}, indent=1))


if __name__ == "__main__":
    main()
