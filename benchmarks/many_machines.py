"""`vit predict --engine ray` with two workers beside `vit predict` on the same cores.

    python benchmarks/many_machines.py FOLDER --output benchmarks/results

FOLDER is an image folder (for the committed result: CIFAR-10 as JPEG files), of which links make
--count images. The model has 32 px and random weights, in float32. Each command is a process of its
own, and its seconds are those of the wall from start to end:

    local      `vit predict FOLDER --output FILE.parquet`
    ray        the same with `--engine ray --workers 2`, in turn with it
    parquet    from rows of Parquet; the job is killed when a quarter is written, and started again
    s3         from and to an S3 server on the same cores; one worker is killed with SIGKILL

"start" is what a command of 64 images takes, which the rates leave out. All rows are compared with
those of "local", to the last bit.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as arrow
import pyarrow.parquet as pq
import torch
from conditions import describe_conditions, write_result
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from vit.bundle import save_bundle
from vit.data.preprocess import Preprocess
from vit.model.vision_transformer import VisionTransformer

NAME = "many-machines"
ARCHITECTURE = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3}
RAY = ("--engine", "ray", "--workers", "2")
START_IMAGES = 64


def start(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vit", "predict", "model.safetensors", *map(str, arguments)]
    return subprocess.Popen([*command, "--precision", "float32", "--device", "cpu"])


def time_command(*arguments: object) -> float:
    begin = time.perf_counter()
    assert start(*arguments).wait() == 0
    return time.perf_counter() - begin


def read_rows(place: object, **options: Any) -> pa.Table:
    return arrow.dataset(str(place), format="parquet", **options).to_table().sort_by("path")


def count_different(rows: pa.Table, expected: pa.Table) -> int:
    """Rows whose probabilities differ in a bit, in the order of the names; all if there are more or
    fewer."""
    if len(rows) != len(expected) or len(rows["path"].unique()) != len(rows):
        return max(len(rows), len(expected))
    found, wanted = (np.stack(each["probabilities"].to_numpy()) for each in (rows, expected))
    return int((found != wanted).any(axis=1).sum())


def wait_for(condition: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert job.poll() is None, "the job ended too early"
        time.sleep(0.1)


def kill_job(job: subprocess.Popen[bytes]) -> None:
    """Kill the command that was started, and wait for Ray's processes, which end by themselves."""
    children = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    job.wait()
    psutil.wait_procs(children, timeout=60)


def kill_worker(job: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(job.pid).children(recursive=True)
    next(each for each in children if "_Worker" in " ".join(each.cmdline())).kill()


@contextmanager
def serve_s3() -> Iterator[Any]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        yield boto3.client("s3")
    finally:
        server.stop()


def prepare(folder: Path, count: int) -> list[Path]:
    """Write the model, `images` and `few`: links to the folder's files, again from the first if they
    are too few."""
    torch.manual_seed(0)
    save_bundle(
        Path("model.safetensors"),
        VisionTransformer(num_classes=10, **ARCHITECTURE),
        preprocess=Preprocess((32, 32)),
        class_names=tuple(f"class {number}" for number in range(10)),
        config={},
        data={},
    )
    files = sorted(path.resolve() for path in folder.rglob("*.jpg"))
    links = []
    for name, number in (("images", count), ("few", START_IMAGES)):
        Path(name).mkdir()
        links = [Path(name) / f"{index:06d}.jpg" for index in range(number)]
        for index, link in enumerate(links):
            link.symlink_to(files[index % len(files)])
    return sorted(Path("images").iterdir())


def measure(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    images = prepare(folder, count)
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    starts = {
        "local": time_command("few", "--output", "few.parquet"),
        "ray": time_command("few", *RAY, "--output", "few-ray"),
    }
    for number in range(rounds):
        seconds["local"].append(time_command("images", "--output", f"local-{number}.parquet"))
        seconds["ray"].append(time_command("images", *RAY, "--output", f"ray-{number}"))
    expected = read_rows("local-0.parquet")
    different = {"ray": count_different(read_rows("ray-0"), expected)}

    rows = [{"image": {"bytes": path.read_bytes(), "path": None}} for path in images]
    pq.write_table(pa.Table.from_pylist(rows), "images.parquet", row_group_size=1000)
    parquet = Path("parquet")
    arguments = ("images.parquet", *RAY, "--output", parquet, "--resume")
    job = start(*arguments)
    wait_for(lambda: len(list(parquet.glob("*.parquet"))) >= count // 4096, job)
    kill_job(job)
    num_written = len(read_rows(parquet))
    assert start(*arguments).wait() == 0
    different["parquet, job killed"] = count_different(read_rows(parquet), expected)

    with serve_s3() as client:
        import fsspec

        client.create_bucket(Bucket="photos")
        for path in images:
            client.put_object(Bucket="photos", Key=f"new/{path.name}", Body=path.read_bytes())
        filesystem = fsspec.filesystem("s3", use_listings_cache=False)
        begin = time.perf_counter()
        job = start("s3://photos/new/", *RAY, "--output", "s3://photos/rows")
        wait_for(lambda: bool(filesystem.glob("photos/rows/*.parquet")), job)
        kill_worker(job)
        assert job.wait() == 0
        seconds["s3, worker killed"] = [time.perf_counter() - begin]
        rows_of_s3 = read_rows("photos/rows", filesystem=filesystem)
        different["s3, worker killed"] = count_different(rows_of_s3, expected)

    rates = {
        name: round((count - START_IMAGES) / (statistics.median(seconds[name]) - starts[name]), 1)
        for name in starts
    }
    return {
        "num_images": count,
        "model": ARCHITECTURE,
        "start_seconds": {name: round(value, 1) for name, value in starts.items()},
        "seconds": {name: [round(each, 1) for each in values] for name, values in seconds.items()},
        "images_per_second": rates,
        "ratio": round(rates["ray"] / rates["local"], 3),
        "rows_before_the_second_start": num_written,
        "different_rows": different,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, help="folder for many-machines-<machine>.json")
    options = parser.parse_args()
    machine = describe_conditions("cpu")
    folder, output = options.folder.resolve(), options.output and options.output.resolve()
    with tempfile.TemporaryDirectory() as place:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        os.chdir(place)
        result = {"machine": machine, **measure(folder, options.count, options.rounds)}
        os.chdir("/")
    print(result)
    if output:
        write_result(output, NAME, result)


if __name__ == "__main__":
    main()
