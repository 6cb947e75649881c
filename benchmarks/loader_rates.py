"""Images a second of a core that loads training images of 224 px, without a model.

    python benchmarks/loader_rates.py FOLDER... --output benchmarks/results

Each FOLDER holds JPEG files, in any depth; the first 256 are used (for the committed result:
Imagenette at 224 px, and 12 photos of ImageNet of about 500 x 375 px). A loader gives uint8 pixels
of random parts (scale 0.08 to 1), half of them flipped; a device would normalise. The variants are

    workers      what a decoding process of `vit train` does (data.pipeline=workers)
    workers before  the same of another checkout (--before CHECKOUT); both in processes of their own
    cached       what its threads and its loop do with decoded pixels (data.pipeline=cached); the
                 parts are cut on the device
    timm         timm's dataset and transform for its prefetching loader
    torchvision  v2 transforms of Pillow's images
    torchvision tensors  v2 transforms of tensors that torchvision decodes

They take turns, a batch each, on one thread. Processor time is that of the process, so other
programs change it little; a figure is the median over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import describe_conditions, name_processor, write_result
from PIL import Image
from torchvision.transforms import v2

from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.data.crop import Crop
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom
from vit.data.sources.base import FileReader
from vit.data.workers import Decoding, DecodingWorkers, use_one_thread

SIDE = 224
SCALE = (0.08, 1.0)
BATCH_SIZE = 32
MAX_FILES = 256
PREPROCESS = Preprocess((SIDE, SIDE))
CROP = Crop(scale=SCALE, flip="random")
# NVIDIA's data sheet of the H100 SXM: dense bfloat16
H100_TFLOPS = 989
UTILISATION = 0.4
MODELS = {"ViT-S/16": (384, 6), "ViT-B/16": (768, 12)}

NAME = "loader-rates"

Load = Callable[[int], object]


def list_files(folder: Path) -> list[Path]:
    """JPEG files spread evenly over the folder's."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    return found[:: max(len(found) // MAX_FILES, 1)][:MAX_FILES]


def open_files(folder: Path) -> ImageDataset:
    names = [str(path.relative_to(folder)) for path in list_files(folder)]
    labels = np.zeros(len(names), dtype=np.int64)
    reader = FileReader(folder, names)
    return ImageDataset(
        name="folder", class_names=("a", "b"), labels=labels, ids=names, reader=reader
    )


def draw(number: int, count: int) -> StatelessRandom:
    """The samples of a batch."""
    return StatelessRandom(0, number, (torch.arange(BATCH_SIZE) + number * BATCH_SIZE) % count)


def build_workers(folder: Path) -> Load:
    dataset = open_files(folder)
    workers = DecodingWorkers(dataset, Decoding(), CROP, PREPROCESS, batch_size=BATCH_SIZE)
    decoder = workers.decoder
    return lambda number: decoder[workers.build_indices(draw(number, len(dataset)))]


def build_cached(folder: Path, cache_dir: Path) -> Load:
    from vit.data.cache import decode_dataset
    from vit.data.gather import choose_stored, gather

    stored_as = choose_stored(PREPROCESS, CROP)
    size = stored_as.resize_size
    stored = decode_dataset(
        open_files(folder), size=size, preprocess=stored_as, cache_dir=cache_dir, progress=False
    )
    assert stored.pixels is not None
    assert stored.sizes is not None
    sizes = torch.from_numpy(stored.sizes).long()

    def list_batches() -> Iterator[StatelessRandom]:
        number = 0
        while True:
            yield draw(number, len(stored))
            number += 1

    batches = gather(stored.pixels, list_batches(), num_threads=1, pinned=False)

    def load(_: int) -> object:
        rng, pixels = next(batches)
        return pixels, CROP.sample(rng, size, sizes[:, rng.sample_ids % len(stored)])

    return load


def build_timm(folder: Path) -> Load:
    from timm.data import create_transform

    transform = create_transform(
        SIDE, is_training=True, use_prefetcher=True, scale=SCALE, color_jitter=None,
        interpolation="bilinear",
    )  # fmt: skip
    return partial(load_files, list_files(folder), lambda path: transform(open_rgb(path)))


def build_torchvision(folder: Path, *, tensors: bool) -> Load:
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    crop = v2.RandomResizedCrop(SIDE, scale=SCALE, antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip()])

    def read(path: Path) -> np.ndarray:
        if tensors:
            decoded = decode_jpeg(read_file(str(path)), ImageReadMode.RGB)
            return transform(decoded).numpy()
        return np.asarray(transform(open_rgb(path)))

    return partial(load_files, list_files(folder), read)


def open_rgb(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def load_files(files: list[Path], read: Callable[[Path], np.ndarray], number: int) -> np.ndarray:
    indices = (number * BATCH_SIZE + np.arange(BATCH_SIZE)) % len(files)
    return np.stack([read(files[index]) for index in indices])


def measure(load: Load, number: int) -> tuple[float, float]:
    """Seconds an image of the processor and of the clock."""
    start = time.process_time(), time.perf_counter()
    load(number)
    return (
        (time.process_time() - start[0]) / BATCH_SIZE,
        (time.perf_counter() - start[1]) / BATCH_SIZE,
    )


def serve(folder: Path) -> None:
    """Measure a batch for each line of standard input."""
    load = build_workers(folder)
    for line in sys.stdin:
        print(json.dumps(measure(load, int(line))), flush=True)


def ask(process: subprocess.Popen[str], number: int) -> tuple[float, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    processor, clock = json.loads(process.stdout.readline())
    return processor, clock


def compare(folder: Path, before: Path | None, rounds: int, cache_dir: Path) -> dict[str, Any]:
    loads: dict[str, Load] = {
        "cached": build_cached(folder, cache_dir),
        "timm": build_timm(folder),
        "torchvision": build_torchvision(folder, tensors=False),
        "torchvision tensors": build_torchvision(folder, tensors=True),
    }
    variants = {name: partial(measure, load) for name, load in loads.items()}
    checkouts = {"workers": Path(__file__).parents[1]}
    if before is not None:
        checkouts["workers before"] = before
    for name, checkout in checkouts.items():
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout)},
        )
        variants[name] = partial(ask, process)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in variants.items():
            taken = run(number)
            # the first round imports
            if number:
                seconds[name].append(taken)
    files = list_files(folder)
    sizes = [Image.open(path).size for path in files]
    rates = {
        name: {
            "images_per_core_second": round(1 / statistics.median(cpu for cpu, _ in times)),
            "images_per_second": round(1 / statistics.median(clock for _, clock in times)),
        }
        for name, times in sorted(seconds.items())
    }
    if before is not None:
        pairs = zip(seconds["workers before"], seconds["workers"], strict=True)
        rates["workers"]["times_before"] = round(
            statistics.median(a[0] / b[0] for a, b in pairs), 2
        )
    return {
        "folder": str(folder),
        "files": len(files),
        "mean_size": [round(statistics.mean(side)) for side in zip(*sizes, strict=True)],
        "mean_kilobytes": round(statistics.mean(path.stat().st_size for path in files) / 1000),
        "variants": rates,
    }


def compute_needs(stored_bytes: int) -> dict[str, Any]:
    """Images a second that models take on 1 and 8 H100s, and GB a second of the cache, on paper."""
    from vit.model.presets import compute_flops

    needs = {}
    for name, (embed_dim, num_heads) in MODELS.items():
        architecture = {
            "img_size": (SIDE, SIDE), "patch_size": 16, "embed_dim": embed_dim, "num_heads": num_heads, "depth": 12,
            "num_classes": 1000,
        }  # fmt: skip
        # a multiplication with its addition counts as two; the backward pass is two forward passes
        flops = 3 * compute_flops(architecture)
        rate = UTILISATION * H100_TFLOPS * 1e12 / flops
        needs[name] = {
            "gflops_per_image": round(flops / 1e9, 1),
            "images_per_second": {count: round(count * rate) for count in (1, 8)},
            "gigabytes_per_second": {
                count: round(count * rate * stored_bytes / 1e9, 1) for count in (1, 8)
            },
        }
    return {"tflops": H100_TFLOPS, "utilisation": UTILISATION, "models": needs}


def build_table(result: dict[str, Any]) -> str:
    """The rates of each set, and what models need, as tables."""
    names = {
        "workers": "workers", "workers before": "before", "timm": "timm", "torchvision": "torchvision v2, Pillow",
        "torchvision tensors": "torchvision v2, tensors", "cached": "from the cache",
    }  # fmt: skip
    rows = [
        [
            "{} x {} px, {} kB".format(*measured["mean_size"], measured["mean_kilobytes"]),
            *(
                f"{measured['variants'][name]['images_per_core_second']:,}"
                if name in measured["variants"]
                else "–"
                for name in names
            ),
        ]
        for measured in result["sets"]
    ]
    rates = to_markdown(["JPEG files", *names.values()], rows)
    needs, machine = result["needs"], result["machine"]
    per_core = result["sets"][0]["variants"]["workers"]["images_per_core_second"]
    models = [
        [
            name,
            f"{count}",
            f"{need['images_per_second'][count]:,}",
            f"{need['images_per_second'][count] / per_core:.0f}",
            f"{need['gigabytes_per_second'][count]}",
        ]
        for name, need in needs["models"].items()
        for count in ("1", "8")
    ]
    header = [
        "model",
        "H100s",
        "images/s",
        "cores that decode the first files",
        "GB/s of the cache",
    ]
    return f"""Images a second and core:

{rates}

On paper, at {needs["utilisation"]:.0%} of {needs["tflops"]} TFLOP/s (NVIDIA's data sheet, dense bfloat16):
1 GB/s of the cache, {result["stored_bytes"] / 1000:.0f} kB an image, is {1e9 / result["stored_bytes"]:,.0f} images/s.

{to_markdown(header, models)}

{name_processor(machine["device"])}, commit {machine["commit"]}."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--before", type=Path, help="another checkout of vit")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # torchvision's decoders are deprecated
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    use_one_thread(0)
    if arguments.serve:
        serve(arguments.folders[0])
        return
    from vit.data.gather import choose_stored

    height, width = choose_stored(PREPROCESS, CROP).resize_size
    stored_bytes = 3 * height * width
    with tempfile.TemporaryDirectory() as cache_dir:
        measured = [
            compare(folder, arguments.before, arguments.rounds, Path(cache_dir))
            for folder in arguments.folders
        ]
    result = {
        "machine": describe_conditions("cpu"),
        "side": SIDE,
        "rounds": arguments.rounds,
        "stored_bytes": stored_bytes,
        "sets": measured,
        "needs": compute_needs(stored_bytes),
    }
    print(json.dumps(result, indent=1))
    if arguments.output is not None:
        write_result(arguments.output, NAME, result)


if __name__ == "__main__":
    main()
