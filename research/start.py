"""Time from process start to the first training step, of images that training decodes as it goes;
memory.

    python research/start.py IMAGES --output benchmarks/results

IMAGES is a folder of class folders of small JPEG files, such as CIFAR-10's, which are copied as
often as it takes. Cold is an empty cache, and the kernel's page cache dropped where that is
allowed; warm is a cache in which an earlier run's first epoch has left what it found. Processes
that decode have pages in common: of each counts what is its own, after twenty steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conditions import describe_conditions, write_result
from study_tables import build_start_table

from vit.data.cache import decode_dataset
from vit.data.open import open_dataset

NAME = "start"
SETTINGS = [
    "data.pipeline=workers", "data.workers=2", "data.image_size=32", "train.device=cpu", "train.batch_size=128",
    "train.compile=false", "model.embed_dim=64", "model.depth=2", "model.num_heads=2",
]  # fmt: skip
MEASURED_STEPS = 20  # before memory is measured
SHARD = 1000  # images


def copy_images(images: Path, folder: Path, count: int) -> None:
    """`count` files below folder/<class>, of at most 4,000 different ones."""
    files = [sorted(entry.iterdir())[:400] for entry in sorted(images.iterdir()) if entry.is_dir()]
    for number in range(count):
        of_class = files[number % len(files)]
        file = of_class[number // len(files) % len(of_class)]
        place = folder / file.parent.name / f"{number:07d}{file.suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())


def write_shards(images: Path, folder: Path) -> None:
    """The same files, in random order, in tar shards."""
    files = sorted(images.rglob("*.*"), key=lambda path: path.name)
    folder.mkdir()
    for start in range(0, len(files), SHARD):
        with tarfile.open(folder / f"train-{start // SHARD:04d}.tar", "w") as tar:
            for file in files[start : start + SHARD]:
                label = folder / "label.cls"
                label.write_text(file.parent.name)
                tar.add(file, file.name)
                tar.add(label, f"{file.stem}.cls")
                label.unlink()


def drop_page_cache() -> bool:
    """Whether the kernel allowed it."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def start_training(data: list[str], cache: Path, output: Path) -> dict[str, Any]:
    """In a process of its own, which says when its first step was done and what memory it takes
    then."""
    overrides = [*SETTINGS, *data, f"data.cache_dir={cache}"]
    command = [sys.executable, __file__, "--train", json.dumps(overrides), "--output", str(output)]
    began = time.time()
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    return found | {"first_step_seconds": found.pop("first_step_at") - began}


def train(overrides: list[str], output: Path) -> None:
    """Stop after a few steps and print what was seen of them."""
    import vit

    found: dict[str, Any] = {}

    class Watch(vit.Observer):
        def on_step(self, metrics: dict[str, Any]) -> bool:
            found.setdefault("first_step_at", time.time())
            if metrics["step"] < MEASURED_STEPS:
                return False
            workers = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            found["main_mib"] = read_memory("self", "Rss")
            found["workers_mib"] = [read_memory(worker, "Private_") for worker in workers]
            return True

    vit.train({}, overrides=overrides, output=output, callbacks=[Watch()])
    print(json.dumps(found))


def read_memory(process: str, kind: str) -> float:
    """MiB."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def measure(images: Path, counts: list[int], folder: Path) -> list[dict[str, Any]]:
    """A row for each kind and number of images."""
    rows = []
    for count in counts:
        files, shards = folder / f"files-{count}", folder / f"shards-{count}"
        copy_images(images, files, count)
        write_shards(files, shards)
        for kind, name, root in (("files", "folder", files), ("shards", "webdataset", shards)):
            data, cache = (
                [f"data.name={name}", f"data.root={root}"],
                folder / f"cache-{kind}-{count}",
            )
            row = {"kind": kind, "images": count, "page_cache_dropped": drop_page_cache()}
            row["cold"] = start_training(data, cache, folder / f"run-{kind}-{count}-cold")
            began, source = time.perf_counter(), open_dataset(name, root=root).split("train")
            decode_dataset(
                source, size=None, cache_dir=cache, workers=2
            )  # as earlier versions did before a first step
            row["scan_seconds"] = time.perf_counter() - began
            row["warm"] = start_training(data, cache, folder / f"run-{kind}-{count}-warm")
            rows.append(row)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, nargs="?")
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.train:
        train(json.loads(options.train), options.output)
        return
    machine = describe_conditions("cpu")
    with TemporaryDirectory() as folder:
        result = {"machine": machine, "rows": measure(options.images, options.counts, Path(folder))}
    print(build_start_table(result))
    print(write_result(options.output, NAME, result))


if __name__ == "__main__":
    main()
