"""What each part of the CIFAR-10 CPU recipe is worth: the recipe with one thing changed, on its
validation images.

    python research/ablation.py data.name=folder data.root=ROOT --seeds 3 --output benchmarks/results

Runs have one thread each, as many at once as there are cores. A change's difference is that to the recipe with the same
seed: the mean over the seeds and Student's 95 % interval of it. The test images are not used. Seconds are the
processor's, of all that a run does. The result is written after every run, and runs that it holds are not repeated; a
result of another configuration is refused. `--changes` measures the recipe and these changes alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from conditions import describe_conditions, find_result, write_result
from scipy import stats
from time_to_accuracy import describe_config

from vit.config import load_config
from vit.runtime.metrics_file import METRICS_FILE, load_metrics

NAME = "ablation-cifar10-cpu"
RECIPE = "configs/cifar10/cpu.yaml"
SHORT = ["train.epochs=5", "train.evaluate_every_epochs=5"]
WHOLE = "the recipe"
# each with the settings that it replaces
CHANGES: dict[str, list[str]] = {
    WHOLE: [],
    "a half of the patches dropped at 24 px, three quarters at 32 px": ["train.patch_drop_rates=[[0.65,0.5],[1,0.75]]"],
    "32 px throughout, three quarters of the patches dropped": [
        "train.image_sizes=null", "train.patch_drop_rates=[[1,0.75]]",
    ],
    "16 px, 24 px with a half of the patches dropped, 32 px with three quarters": [
        "train.image_sizes=[[0.3,0.5],[0.65,0.75],[1,1]]", "train.patch_drop_rates=[[0.3,0],[0.65,0.5],[1,0.75]]",
    ],
    "32 px throughout": ["train.image_sizes=null"],
    "AdamW for Muon, learning rate 0.001": ["optimizer.name=adamw", "optimizer.lr=1e-3", "optimizer.weight_decay=0.05"],
    "patchify stem": ["model.stem=patch"],
    "no residual convolution in the stem": ["model.stem=conv_pool"],
    "GELU for ReLU²": ["model.mlp=gelu"],
    "class token for mean pooling": ["model.global_pool=token"],
    "learned positions for fixed sine ones": ["model.pos_embed=learned"],
    "no averaged weights": ["train.ema_decay=null"],
    # above the recipe's 0.99 nothing would change: the decay rises with the steps, in five epochs
    # to 0.9898
    "averaged weights with decay 0.95": ["train.ema_decay=0.95"],
    "no label smoothing": ["train.label_smoothing=0"],
    "random flips": ["augment.flip=random"],
    "3 blocks": ["model.depth=3"],
    "width 192": ["model.embed_dim=192", "model.num_heads=3"],
    "query-key norm": ["model.qk_norm=true"],
    "batches of 128": ["train.batch_size=128"],
    "crops of images padded by 2 px": ["augment.crop_padding=2"],
    "cutout of 8 px": ["augment.cutout=8"],
    "Muon's learning rate 0.012": ["optimizer.muon_lr=0.012"],
    "Muon's learning rate 0.03": ["optimizer.muon_lr=0.03"],
}  # fmt: skip


def train(
    name: str, overrides: list[str], *, seed: int, core: int, folder: Path, cache: Path
) -> dict[str, Any]:
    """One run of `vit train` on one core, with the change `name`."""
    run = folder / f"run-{core}"
    changes = [*overrides, *CHANGES[name]]
    command = [sys.executable, "-m", "vit", "train", RECIPE, *SHORT, *changes, f"train.seed={seed}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VIT_CACHE": str(cache)}
    with run.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command, "--output", str(run), "--overwrite"],
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{run.with_suffix('.log').read_text()}")
    top1 = load_metrics(run / METRICS_FILE)[-1]["val_top1"]
    return {
        "seed": seed,
        "validation_top1": top1,
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
    }


def summarise(runs: list[dict[str, Any]], recipe: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds; the difference to the recipe's runs with the same seeds, in fractions
    of 1."""
    of_recipe = {run["seed"]: run["validation_top1"] for run in recipe}
    values = [run["validation_top1"] for run in runs]
    differences = [
        run["validation_top1"] - of_recipe[run["seed"]] for run in runs if run["seed"] in of_recipe
    ]
    found: dict[str, Any] = {
        "seeds": len(runs),
        "validation_top1": {
            "mean": statistics.mean(values),
            "standard_deviation": statistics.stdev(values) if len(values) > 1 else None,
        },
        "processor_seconds": statistics.mean(run["processor_seconds"] for run in runs),
        "difference": statistics.mean(differences) if differences else None,
        "half_interval": None,
    }
    if len(differences) > 1:
        error = statistics.stdev(differences) / len(differences) ** 0.5
        found["half_interval"] = float(stats.t.ppf(0.975, len(differences) - 1)) * error
    return found


def measure(
    result: dict[str, Any], output: Path, overrides: list[str], names: list[str], *, seeds: int
) -> None:
    """Run what `result` lacks of the changes `names`, seed by seed, and write it after each run."""
    steps: dict[str, Any] = result["steps"]
    commit, writing, cores = result["machine"]["commit"], Lock(), SimpleQueue[int]()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def run(name: str, seed: int) -> None:
        core = cores.get()
        try:
            found = train(
                name, overrides, seed=seed, core=core, folder=folder, cache=folder / "cache"
            )
        finally:
            cores.put(core)
        with writing:
            steps[name]["runs"].append({**found, "commit": commit})
            for step in steps.values():
                if step["runs"]:
                    step["summary"] = summarise(step["runs"], steps[WHOLE]["runs"])
            write_result(output, NAME, result)
            print(f"{name}: {found}", flush=True)

    # all seeds of a change in turn, so that a measurement that is stopped has whole rows
    wanted = []
    for name in names:
        step = {"overrides": CHANGES[name], "runs": []}
        done = {each["seed"] for each in steps.setdefault(name, step)["runs"]}
        wanted += [(name, seed) for seed in range(seeds) if seed not in done]
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        environment = os.environ | {"VIT_CACHE": str(folder / "cache")}
        decode = ["train", RECIPE, *overrides, "--dry-run", "--output", str(folder / "decoded")]
        subprocess.run(
            [sys.executable, "-m", "vit", *decode],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with ThreadPoolExecutor(cores.qsize()) as pool:
            runs = [pool.submit(run, *each) for each in wanted]
            try:
                for each in runs:
                    each.result()
            except BaseException:  # what failed is told now, not after all that waits
                pool.shutdown(cancel_futures=True)
                raise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--changes", nargs="+", metavar="NAME", default=[*CHANGES], choices=CHANGES)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    options = parser.parse_intermixed_args()
    machine = describe_conditions("cpu")
    config = describe_config(load_config(Path(RECIPE), [*options.overrides, *SHORT]))
    result = {
        "recipe": RECIPE,
        "settings": SHORT,
        "config": config,
        "machine": machine,
        "steps": {},
    }
    path = find_result(options.output, NAME, machine)
    if path.exists():
        before = json.loads(path.read_text())
        if before["config"] != config:
            raise SystemExit(f"{path} is of another configuration; move it away to begin again")
        result = before | result | {"steps": before["steps"]}
    names = list(dict.fromkeys([WHOLE, *options.changes]))
    measure(result, options.output, options.overrides, names, seeds=options.seeds)


if __name__ == "__main__":
    main()
