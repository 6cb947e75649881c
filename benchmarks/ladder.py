"""What each lever of the CIFAR-10 CPU recipe is worth: from AdamW and patches to the recipe, one at a time.

    python benchmarks/ladder.py data.name=folder data.root=ROOT --seeds 1 --output benchmarks/results

Every rung trains for nine epochs with the levers of the rungs before it and one more; the others are the recipe with
one thing changed: what lost, or takes longer than it is worth in nine epochs. The row is written after every run,
and runs that it already holds are not repeated.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rows import describe_conditions, machine_slug
from time_to_accuracy import summarise, time_ours

RECIPE = "configs/cifar10/cpu.yaml"
EPOCHS = "train.epochs=9"
# the levers in the order in which they are pulled, each with what stands there before
LEVERS = {
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
LOSERS = {
    "pooled conv stem with a residual convolution": ["model.stem=conv_pool_residual"],
    "strided conv stem": ["model.stem=conv"],
    "cutout of 8 px": ["augment.cutout=8"],
    "Muon's learning rate 0.02": ["optimizer.muon_lr=0.02"],
    "query-key norm": ["model.qk_norm=true"],
}


def list_rungs() -> dict[str, list[str]]:
    """Name → overrides."""
    names = list(LEVERS)
    without = [[item for name in names[first:] for item in LEVERS[name]] for first in range(len(names) + 1)]
    return dict(zip(["AdamW, patches", *(f"+ {name}" for name in names)], without, strict=True)) | LOSERS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="folder of the row")
    options = parser.parse_intermixed_args()
    machine = describe_conditions("cpu")
    path = options.output / f"ladder-cifar10-cpu-{machine_slug(machine['device'])}.json"
    row: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"recipe": RECIPE, "machine": machine, "rungs": {}}
    )
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        for seed in range(options.seeds):
            for number, (name, changes) in enumerate(list_rungs().items()):
                rung = row["rungs"].setdefault(name, {"overrides": changes, "runs": []})
                if any(run["seed"] == seed for run in rung["runs"]):
                    continue
                rung["runs"].append(
                    time_ours(
                        RECIPE,
                        [*options.overrides, EPOCHS, *changes],
                        seed=seed,
                        directory=Path(directory) / str(number),
                        cache=cache,
                    )
                    | {"commit": machine["commit"]}
                )
                rung["ours"] = summarise(rung["runs"])
                path.write_text(json.dumps(row, indent=1) + "\n")
                print(name, {k: v for k, v in rung["runs"][-1].items() if k != "curve"}, flush=True)


if __name__ == "__main__":
    main()
