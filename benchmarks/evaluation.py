"""Images a second in evaluation, beside the bare model and beside timm's way of validating.

    python benchmarks/evaluation.py FOLDER --output benchmarks/results
    python benchmarks/evaluation.py FOLDER --recipe configs/cifar10/cpu.yaml --output benchmarks/results

FOLDER is an image folder, <class>/<image> (for the committed result: the test split of CIFAR-10 as
JPEG files). All variants run one architecture with the same weights and threads, in bfloat16:

    bare      forward passes alone over a normalised float tensor that is in memory
    vit       what `vit evaluate` does: crop and normalise images of the decoded dataset, forward passes in which
              the head is float32, logits kept
    files     the same from the image files on: what the first `vit evaluate` of a folder does, decoding included
    timm      the loop of timm's validate.py on timm's model: its loader over the files (2 workers), batches of
              256, its accuracy and AverageMeter, the loss read after each batch

    suite     `vit evaluate --corruptions` alone: 75 passes over --corrupted images
    passes    75 passes over as many images that are not corrupted: what the model takes of "suite"

"bare" has the batch size and the memory allocator's settings of "vit". Every variant runs in a
process of its own; they take turns round by round, and a result is the median over the rounds. The
files are in the page cache; decoding them into the dataset, which `vit evaluate` does once, is
timed beside. With --recipe the model is the recipe's, untrained, and "timm", which has no such
stem, is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm.data
import timm.models
import timm.utils
import torch
from conditions import describe_conditions, write_result
from rich.console import Console
from rich.table import Table
from torch import nn

from vit.analysis.robustness.corruptions import CORRUPTIONS, SEVERITIES, measure_corruptions
from vit.config import load_config
from vit.data.cache import decode_dataset
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.evaluation.images import EvaluationSet
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.predictor import BatchPredictor, choose_batch_size
from vit.runtime.device import autocast, choose_device
from vit.runtime.memory import keep_freed_memory
from vit.training.model import build_model

NAME = "evaluation"
ARCHITECTURES = {
    32: {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 9, "num_heads": 3},
    224: {
        "img_size": 224,
        "patch_size": 16,
        "embed_dim": 192,
        "depth": 12,
        "num_heads": 3,
    },  # ViT-Ti/16
}
WORKERS = 2
VARIANTS, SUITE = ("bare", "vit", "files", "timm"), ("suite", "passes")
PASSES = len(CORRUPTIONS) * len(SEVERITIES)
ROWS = {
    "bare": "forward pass over a tensor in memory",
    "vit": "`vit evaluate`",
    "files": "`vit evaluate`, decoding the files first",
    "timm": "timm's validation loop over the files",
    "passes": "75 forward passes, not corrupted",
    "suite": "`vit evaluate --corruptions`, 75 passes",
}


def build_ours(recipe: Path | None, side: int, num_classes: int) -> Any:
    """The model that is measured, untrained."""
    torch.manual_seed(0)
    if recipe is not None:
        return build_model(load_config(recipe), num_classes=num_classes)[0].eval()
    return VisionTransformer(num_classes=num_classes, **ARCHITECTURES[side]).eval()


def describe_model(recipe: Path | None, side: int) -> dict[str, Any]:
    architecture = build_ours(recipe, side, 10).architecture
    of_recipe = {"recipe": str(recipe), "stem": architecture["stem"]} if recipe else {}
    sizes = {name: architecture[name][0] for name in ("img_size", "patch_size")}
    return (
        of_recipe
        | sizes
        | {name: architecture[name] for name in ("embed_dim", "depth", "num_heads")}
    )


def build_variants(
    folder: Path,
    *,
    recipe: Path | None,
    side: int,
    corrupted: int,
    device: torch.device,
    cache: Path,
) -> tuple[dict[str, Callable[[], object]], int, float]:
    """Name → a function that goes once over all images; their number; images a second of
    decoding."""
    batch_size = choose_batch_size(device)
    side = describe_model(recipe, side)["img_size"]
    preprocess = Preprocess(image_size=(side, side), crop_pct=1.0)
    source = open_dataset("folder", root=str(folder)).split("all")
    for name in source.ids:
        (folder / name).read_bytes()
    start = time.perf_counter()
    dataset = decode_dataset(source, size=preprocess.resize_size, cache_dir=cache)
    decoding = len(dataset) / (time.perf_counter() - start)
    pixels = dataset.pixels
    assert pixels is not None
    classes = len(dataset.class_names)
    ours = build_ours(recipe, side, classes).to(device)
    theirs = (
        timm.models.VisionTransformer(num_classes=classes, **ARCHITECTURES[side]).eval().to(device)
    )
    if recipe is None:
        theirs.load_state_dict(ours.state_dict())
    tensor = preprocess.normalize(torch.tensor(pixels).to(device))
    predictor = BatchPredictor(ours, preprocess, classes, batch_size, device, "bfloat16")
    loader = timm.data.create_loader(
        timm.data.create_dataset("", root=str(folder)),
        (3, *preprocess.image_size),
        256,
        num_workers=WORKERS,
        crop_pct=preprocess.crop_pct,
        mean=preprocess.mean,
        std=preprocess.std,
        use_prefetcher=device.type == "cuda",
        pin_memory=device.type == "cuda",
    )

    @torch.inference_mode()
    def bare() -> None:
        with autocast(device, "bfloat16"):
            for batch in tensor.split(batch_size):
                ours(batch)

    def from_files() -> None:
        with tempfile.TemporaryDirectory() as fresh:
            again = decode_dataset(
                source, size=preprocess.resize_size, cache_dir=Path(fresh)
            ).pixels
            assert again is not None
            predictor.predict(lambda a, b: preprocess.crop(again[a:b]), count=len(again))

    sample = EvaluationSet(
        dataset, tuple(dataset.ids[:corrupted]), dataset.labels[:corrupted], preprocess
    )
    variants = {
        "bare": bare,
        "vit": lambda: predictor.predict(
            lambda a, b: preprocess.crop(pixels[a:b]), count=len(pixels)
        ),
        "files": from_files,
        "timm": lambda: validate(theirs, loader, device),
        "suite": lambda: measure_corruptions(predictor, sample),
        "passes": lambda: [
            predictor.predict(sample.read, count=len(sample)) for _ in range(PASSES)
        ],
    }
    return variants, len(pixels), decoding


@torch.inference_mode()
def validate(
    model: nn.Module, loader: timm.data.loader.MultiEpochsDataLoader, device: torch.device
) -> None:
    """What timm's validate.py does with each batch."""
    losses, top1, top5 = (timm.utils.AverageMeter() for _ in range(3))
    criterion = nn.CrossEntropyLoss().to(device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with autocast(device, "bfloat16"):
            logits = model(images)
            loss = criterion(logits, labels)
        first, fifth = timm.utils.accuracy(logits.detach(), labels, topk=(1, 5))
        losses.update(loss.item(), len(images))
        top1.update(first.item(), len(images))
        top5.update(fifth.item(), len(images))


def run_variant(options: argparse.Namespace) -> dict[str, float]:
    """What a child process does: a pass that warms up, and one that counts."""
    device = choose_device(options.device)
    if options.variant != "timm":
        keep_freed_memory()  # as `vit evaluate` does
    with tempfile.TemporaryDirectory() as cache:
        variants, count, decoding = build_variants(
            options.folder,
            recipe=options.recipe,
            side=options.side,
            corrupted=options.corrupted,
            device=device,
            cache=Path(cache),
        )
        in_suite = options.variant in SUITE
        count = min(options.corrupted, count) * PASSES if in_suite else count
        for _ in range(1 if in_suite else 2):
            start = time.perf_counter()
            variants[options.variant]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elapsed = time.perf_counter() - start
    return {"num_images": count, "images_per_second": count / elapsed, "decoding": decoding}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--side", type=int, choices=ARCHITECTURES, default=32, help="of the model's input, pixels"
    )
    parser.add_argument(
        "--recipe", type=Path, help="measure the model of this configuration, not that of --side"
    )
    parser.add_argument(
        "--corrupted",
        type=int,
        default=1000,
        help="images of the corruption suite; 0 leaves it out",
    )
    parser.add_argument(
        "--output", type=Path, help="folder for evaluation-<side>px-<machine>.json, or -<recipe>-"
    )
    parser.add_argument("--variant", choices=VARIANTS + SUITE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(run_variant(options)))
        return
    machine = describe_conditions(choose_device(options.device))
    chosen = tuple(name for name in VARIANTS if name != "timm" or not options.recipe)
    chosen += SUITE if options.corrupted else ()
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for variant in chosen:
            environment = os.environ | (
                {} if variant == "timm" else {"GOMP_SPINCOUNT": "10000"}
            )  # as `vit` does
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            rounds[-1][variant] = json.loads(done.stdout.splitlines()[-1])
    rates = {
        variant: [of_round[variant]["images_per_second"] for of_round in rounds]
        for variant in chosen
    }
    medians = {variant: round(statistics.median(values), 1) for variant, values in rates.items()}
    pairs = [("vit", "bare"), ("vit", "timm"), ("files", "bare"), SUITE]
    ratios = {
        f"{one} / {other}": round(medians[one] / medians[other], 2)
        for one, other in pairs
        if other in medians
    }
    seconds = {name: round(10_000 * PASSES / medians[name]) for name in SUITE if name in medians}
    decoding = statistics.median(of_round["vit"]["decoding"] for of_round in rounds)
    table = Table(
        "", "images/s", title=f"{machine['device']}, {rounds[0]['vit']['num_images']} images"
    )
    for name, rate in (medians | {"decoding, once": decoding}).items():
        table.add_row(name, f"{rate:,.0f}")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.2f} ×")
    for name, needed in seconds.items():
        table.add_row(f"{name} of 10,000 images", f"{needed} s")
    Console().print(table)
    if options.output:
        result = {
            "machine": machine,
            "num_images": rounds[0]["vit"]["num_images"],
            "model": describe_model(options.recipe, options.side),
        }
        result |= {"images_per_second": medians, "rounds": rates, "ratios": ratios}
        result |= {
            "decoding_images_per_second": round(decoding, 1),
            "seconds_of_10000_images": seconds,
        }
        name = (
            "-".join(options.recipe.with_suffix("").parts[-2:])
            if options.recipe
            else f"{options.side}px"
        )
        write_result(options.output, f"{NAME}-{name}", result)


def build_table(result: dict[str, Any]) -> str:
    """Images a second of each variant, and what the corruption suite of 10,000 images takes."""
    rates, seconds = result["images_per_second"], result.get("seconds_of_10000_images", {})
    lines = [
        "| variant | images/s | of the forward pass | 10,000 images × 75 corruptions, s |",
        "|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        if name in rates:
            share, of_suite = f"{rates[name] / rates['bare']:.0%}", seconds.get(name, "")
            lines.append(f"| {row} | {rates[name]:,.0f} | {share} | {of_suite} |")
    model, machine = result["model"], result["machine"]
    of_model = f"model of `{model['recipe']}`, untrained; " if "recipe" in model else ""
    of_model += f"embed_dim {model['embed_dim']}, {model['depth']} blocks, patches of {model['patch_size']} px"
    images = f"{result['num_images']:,} images of {model['img_size']} px"
    return "\n".join(
        [*lines, "", f"{images}; {of_model}; {machine['device']}, commit {machine['commit']}."]
    )


if __name__ == "__main__":
    main()
