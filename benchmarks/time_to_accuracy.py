"""How long a recipe takes to reach an accuracy, from process start, beside a plain loop of timm's model.

    python benchmarks/time_to_accuracy.py configs/cifar10/cpu.yaml data.name=folder data.root=ROOT --seeds 3 \\
        --rival timm --rival-epochs 10 --output benchmarks/results

Ours is `vit train` as a person runs it, once for each seed: the first starts from empty caches (images are decoded,
code is compiled), the others find them. Its test accuracy is `vit evaluate`'s, of the model chosen on the
validation split, with and without the mirrored image.

The rival trains timm's VisionTransformer of the same width, depth, heads and patch size as its users do: a
DataLoader with 2 workers over the same training files, random crop with padding and flip by torchvision, AdamW
(learning rate 1e-3, weight decay 0.05) with a warm-up of an epoch and cosine decay, label smoothing of 0.1,
bfloat16 autocast. It is validated on the same images after every epoch, and tested once at the end.

Times are of the wall clock from the start of the process; both include validation. One row is written.
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

import torch
from PIL import Image
from rows import describe_conditions, write_row

from vit.build.data import build_dataset
from vit.bundle import load_bundle
from vit.config import Config, load_config
from vit.data.sets.source import ImageSource
from vit.runtime.device import choose_device

WORKERS = 2


def time_ours(
    recipe: str, overrides: list[str], *, seed: int, directory: Path, cache: Path
) -> dict[str, Any]:
    """One run of `vit train` and two of `vit evaluate`."""
    run, cold = directory / f"seed-{seed}", not cache.exists()
    directory.mkdir(exist_ok=True)
    environment = os.environ | {"VIT_CACHE": str(cache)}
    vit = [sys.executable, "-m", "vit"]
    command = [*vit, "train", recipe, *overrides, f"train.seed={seed}", "--output", str(run)]
    curve: list[dict[str, float]] = []
    seen = 0
    metrics, said = run / "metrics.jsonl", directory / f"seed-{seed}.log"
    with said.open("w") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(0.2)
            rows = metrics.read_text().splitlines() if metrics.exists() else []
            now = round(time.perf_counter() - start, 1)
            for line in rows[seen:]:
                row = json.loads(line)
                if row["val_top1"] is not None:  # not every epoch is followed by a validation
                    curve.append({"seconds": now, "epoch": row["epoch"], "top1": row["val_top1"]})
            seen = len(rows)
        seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"vit train failed: {said.read_text()}")
    figures = {}
    for name, options in (("test_top1", []), ("test_top1_mirrored", ["--mirrored"])):
        evaluation = directory / f"seed-{seed}-{name}"
        command = [*vit, "evaluate", str(run), *options, "--pictures", "0", "--output", str(evaluation)]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        figures[name] = json.loads((evaluation / "evaluation.json").read_text())["top1"]
    return {"seed": seed, "cold": cold, "seconds": round(seconds, 1), **figures, "curve": curve}


class Files(torch.utils.data.Dataset[tuple[Any, int]]):
    """The files of a source as torchvision's ImageFolder would give them."""

    def __init__(self, source: ImageSource, transform: Any) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Image.Image = self.source.read(index)
        return self.transform(image), int(self.source.labels[index])


def run_rival(
    config: Config, device: torch.device, *, seed: int, epochs: int, seconds: float, started: float
) -> dict[str, Any]:
    """timm's model in a plain loop, for `epochs` or until `seconds` are over."""
    import timm
    from torchvision import transforms

    torch.manual_seed(seed)
    size, model_config = config.data.image_size, config.model
    assert isinstance(size, int)
    plain = [transforms.ToTensor(), transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
    changes = [transforms.RandomCrop(size, padding=size // 8), transforms.RandomHorizontalFlip()]
    dataset = build_dataset(config)
    sources = {split: dataset.split(split) for split in ("train", "validation")}
    loaders = {
        split: torch.utils.data.DataLoader(
            Files(source, transforms.Compose([*(changes if split == "train" else []), *plain])),
            config.train.batch_size,
            shuffle=split == "train",
            drop_last=split == "train",
            num_workers=WORKERS,
            persistent_workers=True,
            pin_memory=device.type == "cuda",
        )
        for split, source in sources.items()
    }
    model = timm.models.VisionTransformer(
        img_size=size,
        num_classes=len(sources["train"].class_names),
        patch_size=model_config.patch_size,
        embed_dim=model_config.embed_dim,
        depth=model_config.depth,
        num_heads=model_config.num_heads,
        mlp_ratio=model_config.mlp_ratio,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    steps = len(loaders["train"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=steps * epochs, pct_start=1 / epochs, cycle_momentum=False
    )
    curve: list[dict[str, float]] = []
    for epoch in range(1, epochs + 1):
        model.train()
        for images, labels in loaders["train"]:
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(images.to(device, non_blocking=True))
                loss = torch.nn.functional.cross_entropy(
                    logits, labels.to(device, non_blocking=True), label_smoothing=0.1
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        top1 = score(model, loaders["validation"], device)
        curve.append({"seconds": round(time.perf_counter() - started, 1), "epoch": epoch, "top1": top1})
        print(f"rival: {curve[-1]}", file=sys.stderr, flush=True)
        if curve[-1]["seconds"] > seconds:
            break
    elapsed = round(time.perf_counter() - started, 1)
    test = Files(dataset.split("test"), transforms.Compose(plain))
    loader = torch.utils.data.DataLoader(test, config.train.batch_size, num_workers=WORKERS)
    return {
        "seed": seed,
        "seconds": elapsed,
        "epochs": len(curve),
        "planned_epochs": epochs,
        "test_top1": score(model, loader, device),
        "curve": curve,
    }


@torch.no_grad()
def score(model: torch.nn.Module, loader: Any, device: torch.device) -> float:
    """Top-1, 0 to 1."""
    model.eval()
    correct = total = 0
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16):
            predicted = model(images.to(device)).argmax(dim=1).cpu()
        correct, total = correct + int((predicted == labels).sum()), total + len(labels)
    return correct / total


def summarise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over the seeds."""
    figures: dict[str, Any] = {"seeds": len(runs)}
    for name in ("test_top1", "test_top1_mirrored", "seconds"):
        values = [run[name] for run in runs if name in run]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else None
            figures[name] = {"mean": statistics.mean(values), "standard_deviation": spread}
    return figures


def time_to(curve: list[dict[str, float]], top1: float) -> float | None:
    """Seconds until the validation accuracy was first reached."""
    return next((point["seconds"] for point in curve if point["top1"] >= top1), None)


def compare(
    ours: list[dict[str, Any]], rival: list[dict[str, Any]], top1: float
) -> dict[str, float | bool | None]:
    """Median times to `top1`. A rival that never got there has the ratio of the time it was given, a bound."""
    reached = [time_to(run["curve"], top1) for run in ours]
    theirs = [time_to(run["curve"], top1) for run in rival]
    if any(seconds is None for seconds in reached) or not rival:
        return {"top1": top1, "ours_seconds": None, "rival_seconds": None, "ratio": None}
    mine = statistics.median(seconds for seconds in reached if seconds is not None)
    reaches = None not in theirs
    other = statistics.median(
        run["curve"][-1]["seconds"] if seconds is None else seconds
        for run, seconds in zip(rival, theirs, strict=True)
    )
    return {
        "top1": top1,
        "ours_seconds": mine,
        "rival_seconds": other,
        "rival_reached_it": reaches,
        "ratio": round(other / mine, 2),
    }


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--seeds", type=int, default=3)
    rivals = parser.add_mutually_exclusive_group()
    rivals.add_argument("--rival", choices=["timm"])
    rivals.add_argument("--rival-from", type=Path, metavar="ROW", help="take its runs from an earlier row")
    parser.add_argument("--rival-seeds", type=int, default=1)
    parser.add_argument("--rival-epochs", type=int, default=10)
    parser.add_argument("--rival-seconds", type=float, default=float("inf"), help="stop it after an epoch")
    parser.add_argument("--target", type=float, default=0.75, help="validation top-1 to time")
    parser.add_argument("--name", help="of the row; default: the recipe's path")
    parser.add_argument("--output", type=Path, help="folder for the row")
    parser.add_argument("--only-rival", type=int, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    config = load_config(Path(options.recipe), options.overrides)
    device = choose_device(config.train.device)
    if options.only_rival is not None:
        limits = {"epochs": options.rival_epochs, "seconds": options.rival_seconds}
        print(json.dumps(run_rival(config, device, seed=options.only_rival, started=started, **limits)))
        return
    machine = describe_conditions(device)
    ours: list[dict[str, Any]] = []
    earlier = json.loads(options.rival_from.read_text()) if options.rival_from else {}
    if earlier and earlier["machine"]["device"] != machine["device"]:
        parser.error(f"{options.rival_from} was measured on {earlier['machine']['device']}")
    rival: list[dict[str, Any]] = earlier.get("rival_runs", [])
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cache"
        for seed in range(max(options.seeds, options.rival_seeds if options.rival else 0)):
            if seed < options.seeds:
                ours.append(
                    time_ours(
                        options.recipe, options.overrides, seed=seed, directory=Path(directory), cache=cache
                    )
                )
                print(f"seed {seed}: { {k: v for k, v in ours[-1].items() if k != 'curve'} }", flush=True)
            if options.rival and seed < options.rival_seeds:
                command = [sys.executable, __file__, *sys.argv[1:], "--only-rival", str(seed)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rival.append(json.loads(done.stdout.splitlines()[-1]))
        bundle = load_bundle(Path(directory) / "seed-0")
        row = {
            "recipe": options.recipe,
            "overrides": [item for item in options.overrides if not item.startswith("data.root=")],
            "machine": machine,
            "data": {"fingerprint": bundle.data["fingerprint"], "notes": bundle.data["notes"]},
            "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
            "config": config.model_dump(mode="json", exclude={"data": {"root", "cache_dir"}}),
            "ours": summarise(ours),
            "rival": summarise(rival) if rival else None,
            "time_to": compare(ours, rival, options.target),
            "runs": ours,
            "rival_runs": rival,
            "rival_machine": earlier.get("rival_machine", earlier.get("machine", machine)) if rival else None,
        }
    print(json.dumps({key: row[key] for key in ("ours", "rival", "time_to")}, indent=1))
    if options.output:
        name = options.name or options.recipe.removeprefix("configs/").removesuffix(".yaml").replace("/", "-")
        print(write_row(options.output, f"record-{name}", row))


if __name__ == "__main__":
    main()
