"""Images a second in evaluation, beside the bare model and beside timm's way of validating.

    python benchmarks/evaluation.py FOLDER --output benchmarks/results

FOLDER is an image folder, <class>/<image> (for the committed result: the test split of CIFAR-10 as JPEG files). All
variants run one architecture with the same weights and threads, in bfloat16:

    bare      forward passes alone over a normalised float tensor that is in memory
    vit       what `vit evaluate` does: crop and normalise images of the decoded dataset, forward passes in which
              the head is float32, logits kept
    timm      the loop of timm's validate.py on timm's model: its loader over the files (2 workers), batches of
              256, its accuracy and AverageMeter, the loss read after each batch

"bare" has the batch size and the memory allocator's settings of "vit". Every variant runs in a process of its own; they
take turns round by round, and a result is the median over the rounds. The files are in the page cache; decoding
them into the dataset, which `vit evaluate` does once, is timed beside.
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

import timm.data
import timm.models
import timm.utils
import torch
from conditions import describe_conditions, write_result
from rich.console import Console
from rich.table import Table
from torch import nn

from vit.data.cache import decode_dataset
from vit.data.images import Preprocess
from vit.data.open import open_dataset
from vit.evaluation.predictor import Predictor, autocast
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import choose_device
from vit.runtime.memory import keep_freed_memory

ARCHITECTURE = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 9, "num_heads": 3}
PREPROCESS = Preprocess(image_size=(32, 32), crop_pct=1.0)
WORKERS = 2
VARIANTS = ("bare", "vit", "timm")


def build_variants(
    folder: Path, *, device: torch.device, cache: Path
) -> tuple[dict[str, Callable[[], object]], int, float]:
    """Name → a function that goes once over all images; their number; images a second of decoding."""
    batch_size = 64 if device.type == "cpu" else 256  # as `vit evaluate` chooses
    source = open_dataset("folder", root=str(folder)).split("all")
    for name in source.ids:
        (folder / name).read_bytes()
    start = time.perf_counter()
    dataset = decode_dataset(source, size=PREPROCESS.resize_size, cache_dir=cache)
    decoding = len(dataset) / (time.perf_counter() - start)
    pixels = dataset.images
    assert pixels is not None
    classes = len(dataset.class_names)
    torch.manual_seed(0)
    theirs = timm.models.VisionTransformer(num_classes=classes, **ARCHITECTURE).eval().to(device)
    ours = VisionTransformer(num_classes=classes, **ARCHITECTURE).eval().to(device)
    ours.load_state_dict(theirs.state_dict())
    tensor = PREPROCESS.normalize(torch.tensor(pixels).to(device))
    predictor = Predictor(ours, PREPROCESS, classes, batch_size, device, "bfloat16")
    loader = timm.data.create_loader(
        timm.data.create_dataset("", root=str(folder)),
        (3, *PREPROCESS.image_size),
        256,
        num_workers=WORKERS,
        crop_pct=PREPROCESS.crop_pct,
        mean=PREPROCESS.mean,
        std=PREPROCESS.std,
        use_prefetcher=device.type == "cuda",
        pin_memory=device.type == "cuda",
    )

    @torch.inference_mode()
    def bare() -> None:
        with autocast(device, "bfloat16"):
            for batch in tensor.split(batch_size):
                ours(batch)

    variants = {
        "bare": bare,
        "vit": lambda: predictor.predict(lambda a, b: PREPROCESS.crop(pixels[a:b]), count=len(pixels)),
        "timm": lambda: validate(theirs, loader, device),
    }
    return variants, len(pixels), decoding


@torch.inference_mode()
def validate(model: nn.Module, loader: timm.data.loader.MultiEpochsDataLoader, device: torch.device) -> None:
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
        variants, count, decoding = build_variants(options.folder, device=device, cache=Path(cache))
        for _ in range(2):
            start = time.perf_counter()
            variants[options.variant]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elapsed = time.perf_counter() - start
    return {"num_images": count, "images_per_second": count / elapsed, "decoding": decoding}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="folder for evaluation-<machine>.json")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(run_variant(options)))
        return
    machine = describe_conditions(choose_device(options.device))
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(options.rounds):
        rounds.append({})
        for variant in VARIANTS:
            environment = os.environ | ({} if variant == "timm" else {"GOMP_SPINCOUNT": "10000"})  # as `vit` does
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rounds[-1][variant] = json.loads(done.stdout.splitlines()[-1])
    rates = {variant: [of_round[variant]["images_per_second"] for of_round in rounds] for variant in VARIANTS}
    medians = {variant: round(statistics.median(values), 1) for variant, values in rates.items()}
    ratios = {f"vit / {variant}": round(medians["vit"] / medians[variant], 2) for variant in ("bare", "timm")}
    decoding = statistics.median(of_round["vit"]["decoding"] for of_round in rounds)
    table = Table("", "images/s", title=f"{machine['device']}, {rounds[0]['vit']['num_images']} images")
    for name, rate in (medians | {"decoding, once": decoding}).items():
        table.add_row(name, f"{rate:,.0f}")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.2f} ×")
    Console().print(table)
    if options.output:
        result = {"machine": machine, "num_images": rounds[0]["vit"]["num_images"], "model": ARCHITECTURE}
        result |= {"images_per_second": medians, "rounds": rates, "ratios": ratios}
        write_result(options.output, "evaluation", result | {"decoding_images_per_second": round(decoding, 1)})


if __name__ == "__main__":
    main()
