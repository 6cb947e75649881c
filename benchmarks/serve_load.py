"""`vit serve` under load, beside onnxruntime in one process.

    python benchmarks/serve_load.py --before CHECKOUT --output benchmarks/results

Clients over loopback keep a connection open and send the next photo, as a form, when the answer has come. They take
turns with the server of another checkout (--before) and with a process that decodes the same files with Pillow and runs
the exported model on one after the other, with onnxruntime's defaults. Photos are those of docs/photos, or of --photos.
Each measurement lasts --seconds, after a second that doesn't count; a result is the median over the rounds. Processor
time is that of the server alone; the clients' is beside it, because they share the processor with it.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from conditions import ROOT, describe_conditions, write_result

NAME = "serve"
WARM_UP_SECONDS = 1.0
CLIENTS = (1, 10, 50, 100)
_HEAD = (
    "POST /predict?map=none HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n"
    "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
)
_FORM = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n%b\r\n--x--\r\n'
# decodes and predicts the files that follow, until the time is over
_ONNXRUNTIME = """
import itertools, json, os, sys, time
import numpy as np, onnxruntime
from PIL import Image
model, seconds, warm_up, *paths = sys.argv[1:]
session = onnxruntime.InferenceSession(model)
def ask(path):
    start = time.perf_counter()
    session.run(["probabilities"], {"images": np.asarray(Image.open(path).convert("RGB"))[None]})
    return time.perf_counter() - start
paths = itertools.cycle(paths)
start = time.perf_counter()
while time.perf_counter() < start + float(warm_up):
    ask(next(paths))
times, start, before = [], time.perf_counter(), time.process_time()
while time.perf_counter() < start + float(seconds):
    times.append(ask(next(paths)))
print(json.dumps([times, time.perf_counter() - start, time.process_time() - before]))
"""


def measure(
    port: int, process: psutil.Process, photos: Sequence[bytes], *, clients: int, seconds: float
) -> dict[str, float]:
    """Images a second, latencies in milliseconds and processor time of a server under load."""
    requests = [
        _HEAD.format(len(body)).encode() + body for body in (_FORM % each for each in photos)
    ]
    latencies: list[float] = []
    errors = 0
    # from here on it counts
    start = time.perf_counter() + WARM_UP_SECONDS

    async def ask(number: int) -> None:
        nonlocal errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (sent := time.perf_counter()) < start + seconds:
            writer.write(requests[number % len(requests)])
            number += 1
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
            await reader.readexactly(int(length))
            is_right = head.startswith(b"HTTP/1.1 200")
            if start <= time.perf_counter() < start + seconds:
                latencies.append(time.perf_counter() - sent)
                errors += not is_right
            if not is_right:
                await asyncio.sleep(1)
        writer.close()

    async def run() -> tuple[float, float]:
        asks = [asyncio.ensure_future(ask(number)) for number in range(clients)]
        await asyncio.sleep(WARM_UP_SECONDS)
        before = count_seconds(process), time.process_time()
        await asyncio.sleep(seconds)
        after = count_seconds(process), time.process_time()
        await asyncio.gather(*asks)
        return after[0] - before[0], after[1] - before[1]

    server_seconds, client_seconds = asyncio.run(run())
    num_answers = len(latencies) - errors
    return {
        **summarize(latencies, num_answers, seconds, server_seconds),
        "client_processor_ms": 1000 * client_seconds / max(num_answers, 1),
        "errors": errors,
    }


def summarize(
    latencies: Sequence[float], num_images: int, seconds: float, processor_seconds: float
) -> dict[str, float]:
    """What is measured of servers and of onnxruntime."""
    p50, p99 = np.percentile(latencies, [50, 99]).tolist()
    return {
        "images_per_second": num_images / seconds,
        "p50_ms": 1000 * p50,
        "p99_ms": 1000 * p99,
        "processor_ms": 1000 * processor_seconds / max(num_images, 1),
    }


def count_seconds(process: psutil.Process) -> float:
    """Processor time of a process and those that it started."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


def measure_onnxruntime(model: Path, paths: Sequence[Path], seconds: float) -> dict[str, float]:
    """The same of onnxruntime in a process of its own."""
    arguments = [str(model), str(seconds), str(WARM_UP_SECONDS), *map(str, paths)]
    output = subprocess.run(
        [sys.executable, "-c", _ONNXRUNTIME, *arguments], check=True, stdout=subprocess.PIPE
    )
    times, wall, processor = json.loads(output.stdout)
    return summarize(times, len(times), wall, processor)


@contextmanager
def start_server(tree: Path, model: str, *options: str) -> Iterator[tuple[int, psutil.Process]]:
    """A server of a checkout: its port and its process."""
    with TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vit",
                "serve",
                model,
                "--port",
                "0",
                "--device",
                "cpu",
                *options,
            ],
            env={**os.environ, "PYTHONPATH": str(tree)},
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            address = next(line for line in process.stderr if line.startswith("http"))
            yield int(address.split()[0].rpartition(":")[2]), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.communicate()


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="imagenette")
    parser.add_argument("--photos", type=Path, default=ROOT / "docs" / "photos")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    paths = sorted(arguments.photos.glob("*.jpg"))
    photos = [path.read_bytes() for path in paths]

    variants = {
        "vit serve": (ROOT, ()),
        "vit serve --precision float32": (ROOT, ("--precision", "float32")),
        "vit serve --workers 2": (ROOT, ("--workers", "2")),
    }
    if arguments.before:
        variants = {"before": (arguments.before.resolve(), ()), **variants}
    measured: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        subprocess.run(
            [sys.executable, "-m", "vit", "export", arguments.model, "--output", str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        servers = {
            name: stack.enter_context(start_server(tree, arguments.model, *options))
            for name, (tree, options) in variants.items()
        }
        for _ in range(arguments.rounds):
            for clients in arguments.clients:
                result = measure_onnxruntime(folder / "model.onnx", paths, arguments.seconds)
                measured.setdefault("onnxruntime", []).append(result)
                for name, (port, process) in servers.items():
                    # workers and precision are compared where it matters
                    if name.startswith("vit serve -") and clients != 50:
                        continue
                    result = measure(
                        port, process, photos, clients=clients, seconds=arguments.seconds
                    )
                    measured.setdefault(f"{name}, {clients} clients", []).append(result)
    results = {
        name: {key: statistics.median(result[key] for result in rounds) for key in rounds[0]}
        for name, rounds in measured.items()
    }
    for name, result in results.items():
        values = "  ".join(f"{key} {value:.1f}" for key, value in result.items())
        print(f"{name:44} {values}")
    if arguments.output:
        result: dict[str, Any] = {
            "machine": describe_conditions("cpu"),
            "model": arguments.model,
            "bytes": [len(photo) for photo in photos],
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
            "results": results,
        }
        path = write_result(arguments.output, NAME, result)
        print(path)


if __name__ == "__main__":
    main()
