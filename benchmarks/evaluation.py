"""Images a second in evaluation, beside the bare model and beside timm's way of validating.

    python benchmarks/evaluation.py FOLDER --output benchmarks/results

FOLDER is an image folder, <class>/<image> (for the committed row: the test split of CIFAR-10 as JPEG files). All
arms run one architecture with the same weights, batch size and threads, in bfloat16:

    bare      forward passes alone over a normalised float tensor that is in memory
    vit       what `vit evaluate` does: crop and normalise images of the decoded store, forward passes in which
              the head is float32, logits kept
    timm      the loop of timm's validate.py on timm's model: its loader over the files (2 workers), its
              accuracy and AverageMeter, the loss read after each batch

They take turns round by round; a figure is the median over the rounds. The files are in the page cache;
decoding them into the store, which `vit evaluate` does once, is timed beside.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm.data
import timm.models
import timm.utils
import torch
from rich.console import Console
from rich.table import Table
from rows import describe_conditions, write_row
from torch import nn

from vit.data.images import Preprocess
from vit.data.sources import load_source
from vit.data.stores import build_store
from vit.device import choose_device
from vit.evaluate.predict import Predictor, autocast
from vit.model.vision_transformer import VisionTransformer

ARCHITECTURE = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 9, "num_heads": 3}
PREPROCESS = Preprocess(image_size=(32, 32), crop_fraction=1.0)
WORKERS = 2
ARMS = ("bare", "vit", "timm")


def build_arms(
    folder: Path, *, batch_size: int, device: torch.device, cache: Path
) -> tuple[dict[str, Callable[[], object]], int, float]:
    """Name → a function that goes once over all images; their number; images a second of decoding."""
    source = load_source("folder", root=str(folder), split="all")
    for name in source.ids:
        (folder / name).read_bytes()
    start = time.perf_counter()
    store = build_store(source, size=PREPROCESS.resize_size, cache_dir=cache)
    decoding = len(store) / (time.perf_counter() - start)
    pixels = store.images
    assert pixels is not None
    classes = len(store.class_names)
    torch.manual_seed(0)
    theirs = timm.models.VisionTransformer(num_classes=classes, **ARCHITECTURE).eval().to(device)
    ours = VisionTransformer(num_classes=classes, **ARCHITECTURE).eval().to(device)
    ours.load_state_dict(theirs.state_dict())
    tensor = PREPROCESS.normalize(torch.tensor(pixels).to(device))
    predictor = Predictor(ours, PREPROCESS, classes, batch_size, device, "bfloat16")
    loader = timm.data.create_loader(
        timm.data.create_dataset("", root=str(folder)),
        (3, *PREPROCESS.image_size),
        batch_size,
        num_workers=WORKERS,
        crop_pct=PREPROCESS.crop_fraction,
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

    arms = {
        "bare": bare,
        "vit": lambda: predictor.predict(lambda a, b: PREPROCESS.crop(pixels[a:b]), count=len(pixels)),
        "timm": lambda: validate(theirs, loader, device),
    }
    return arms, len(pixels), decoding


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="folder for evaluation-<machine>.json")
    options = parser.parse_args()
    device = choose_device(options.device)
    machine = describe_conditions(device)
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as cache:
        arms, count, decoding = build_arms(
            options.folder, batch_size=options.batch_size, device=device, cache=Path(cache)
        )
        for number in range(options.rounds + 1):
            for name, arm in arms.items():
                start = time.perf_counter()
                arm()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if number:  # the first round warms up
                    rates[name].append(count / (time.perf_counter() - start))
    figures = {name: round(statistics.median(values), 1) for name, values in rates.items()}
    ratios = {  # of arms in one round, which met the same load
        f"vit / {name}": round(statistics.median(map(float.__truediv__, rates["vit"], rates[name])), 3)
        for name in ("bare", "timm")
    }
    table = Table("", "images/s", title=f"{machine['device']}, {count} images")
    for name, rate in (figures | {"decoding, once": decoding}).items():
        table.add_row(name, f"{rate:,.0f}")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.2f} ×")
    Console().print(table)
    if options.output:
        row = {"machine": machine, "num_images": count, "batch_size": options.batch_size}
        row |= {"model": ARCHITECTURE, "images_per_second": figures, "ratios": ratios}
        write_row(options.output, "evaluation", row | {"decoding_images_per_second": round(decoding, 1)})


if __name__ == "__main__":
    main()
