"""What each part of the CIFAR-10 CPU recipe is worth: from AdamW and patches to the recipe, one change at a time.

    python benchmarks/ablation.py data.name=folder data.root=ROOT --seeds 1 --output benchmarks/results

Every step trains for nine epochs with the changes of the steps before it and one more. The alternatives are the
recipe with one thing changed: what was worse, or takes longer than it is worth in nine epochs. The result is
written after every run, and runs that it already holds are not repeated.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from conditions import describe_conditions, machine_slug
from time_to_accuracy import summarise, time_ours

RECIPE = "configs/cifar10/cpu.yaml"
EPOCHS = "train.epochs=9"
# the changes in the order in which they are made, each with the settings that it replaces
CHANGES = {
    "label smoothing, averaged weights": ["train.label_smoothing=0", "train.ema_decay=null"],
    "mean pooling, fixed sine positions": ["model.global_pool=token", "model.pos_embed=learned"],
    "ReLU² for GELU": ["model.mlp=gelu"],
    "Muon, linear decay": [
        *("optimizer.name=adamw", "optimizer.lr=1e-3", "optimizer.weight_decay=0.05"),
        *("schedule.name=cosine", "schedule.warmup_epochs=1"),
    ],
    "pooled conv stem": ["model.stem=patch"],
    "24 px for 60 % of the epochs": ["train.image_sizes=null"],
}
ALTERNATIVES = {
    "pooled conv stem with a residual convolution": ["model.stem=conv_pool_residual"],
    "strided conv stem": ["model.stem=conv"],
    "cutout of 8 px": ["augment.cutout=8"],
    "Muon's learning rate 0.02": ["optimizer.muon_lr=0.02"],
    "query-key norm": ["model.qk_norm=true"],
}


def list_steps() -> dict[str, list[str]]:
    """Name of the ablation step → overrides."""
    names = list(CHANGES)
    without = [[item for name in names[first:] for item in CHANGES[name]] for first in range(len(names) + 1)]
    return dict(zip(["AdamW, patches", *(f"+ {name}" for name in names)], without, strict=True)) | ALTERNATIVES


def measure(result: dict[str, Any], path: Path, overrides: list[str], *, seeds: int) -> None:
    """Run what `result` lacks, and write it to `path` after each run."""
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        for seed in range(seeds):
            for number, (name, changes) in enumerate(list_steps().items()):
                step = result["steps"].setdefault(name, {"overrides": changes, "runs": []})
                if any(run["seed"] == seed for run in step["runs"]):
                    continue
                arguments, folder = [*overrides, EPOCHS, *changes], Path(directory) / str(number)
                run = time_ours(RECIPE, arguments, seed=seed, directory=folder, cache=cache)
                step["runs"].append(run)
                step["ours"] = summarise(step["runs"])
                path.write_text(json.dumps(result, indent=1) + "\n")
                print(name, {key: value for key, value in run.items() if key != "curve"}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    options = parser.parse_intermixed_args()
    machine = describe_conditions("cpu")
    path = options.output / f"ablation-cifar10-cpu-{machine_slug(machine['device'])}.json"
    result = {"recipe": RECIPE, "machine": machine, "steps": {}}
    measure(json.loads(path.read_text()) if path.exists() else result, path, options.overrides, seeds=options.seeds)


if __name__ == "__main__":
    main()
