"""Measure the accuracy and the time of a recipe over seeds.

    python benchmarks/time_to_accuracy.py configs/cifar10/cpu.yaml data.name=folder data.root=ROOT \\
        --seeds 3 --output benchmarks/results

Each seed is a run of `vit train`, as users start it. The first one starts with an empty cache: it decodes the
images and compiles. Test accuracy is that of `vit evaluate`. Seconds are from the start of the process to its end, with
validation. The result is written after each seed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result

from vit.config import load_config
from vit.runtime.device import choose_device


def time_run(options: argparse.Namespace, *, seed: int, folder: Path) -> dict[str, Any]:
    """Train one seed, and return its seconds and test accuracy."""
    run, cache = folder / f"seed-{seed}", options.cache or folder / "cache"
    cold = not cache.exists()
    environment = os.environ | {"VIT_CACHE": str(cache)}
    vit = [sys.executable, "-m", "vit"]
    train = [*vit, "train", options.recipe, *options.overrides, f"train.seed={seed}"]
    start = time.perf_counter()
    subprocess.run([*train, "--output", str(run)], env=environment, check=True)
    seconds = time.perf_counter() - start
    evaluation = folder / f"seed-{seed}-evaluation"
    evaluate = [*vit, "evaluate", str(run), "--num-examples", "0", "--output", str(evaluation)]
    subprocess.run(evaluate, env=environment, check=True, capture_output=True)
    found = json.loads((evaluation / "evaluation.json").read_text())
    metrics = found.get("metrics", found)
    return {
        "seed": seed,
        "commit": describe_conditions("cpu")["commit"],
        "cold": cold,
        "seconds": round(seconds, 1),
        "test_top1": metrics["top1"],
        "test_top1_interval": found["intervals"]["top1"],
    }


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means and standard deviations over seeds, and the mean ends of the intervals."""
    summary: dict[str, Any] = {"seeds": len(runs)}
    for name in ("test_top1", "seconds"):
        values = [run[name] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {"mean": statistics.mean(values), "standard_deviation": spread}
    ends = zip(*(run["test_top1_interval"] for run in runs), strict=True)
    summary["test_top1"]["interval"] = [statistics.mean(end) for end in ends]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="folder of decoded images that stays")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    options = parser.parse_intermixed_args()
    config = load_config(Path(options.recipe), options.overrides)
    name = options.recipe.removeprefix("configs/").removesuffix(".yaml").replace("/", "-")
    result: dict[str, Any] = {
        "machine": describe_conditions(choose_device(config.train.device)),
        "recipe": options.recipe,
        "overrides": [item for item in options.overrides if not item.startswith("data.root=")],
        "config": config.model_dump(mode="json", exclude={"data": {"root"}}),
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            result["runs"].append(time_run(options, seed=seed, folder=Path(folder)))
            result["ours"] = summarise(result["runs"])
            # after each seed: the next one may be cut off
            print(write_result(options.output, f"recipe-{name}", result), result["ours"])


if __name__ == "__main__":
    main()
