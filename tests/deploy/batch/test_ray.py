"""A cluster of this machine's cores gives the rows of one process, each once, whatever is killed."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as arrow
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vit
from tests.conftest import Launcher
from tests.object_storage import Bucket, serve_s3

FLOAT32 = ("--precision", "float32", "--device", "cpu")
RAY = ("--engine", "ray", "--workers", "2")


def write_images(folder: Path, count: int) -> list[Path]:
    """Noise, and a file that is no image."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05d}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return sorted(folder.iterdir())


def read_rows(place: object, **options: Any) -> dict[str, dict[str, Any]]:
    """Path → row, each once."""
    rows = arrow.dataset(place, format="parquet", **options).to_table().to_pylist()
    by_path = {row["path"]: row for row in rows}
    assert len(by_path) == len(rows)
    return by_path


def check_rows(rows: dict[str, dict[str, Any]], expected: dict[str, Any]) -> None:
    """Rows are those of `vit.Predictor`, to the last bit."""
    assert len(rows) == len(expected["path"])
    for row, columns in zip(rows.values(), zip(*expected.values(), strict=True), strict=True):
        for name, value in zip(expected, columns, strict=True):
            if name == "path":
                continue
            found = row[name]
            if isinstance(value, np.ndarray):
                # null stands for a row of NaN
                numbers = np.full_like(value, np.nan) if found is None else np.float32(found)
                assert np.array_equal(numbers, value, equal_nan=True), name
            elif name == "error" and value is not None:
                # it names the file in its place
                assert found.partition(" can't be read")[2] == value.partition(" can't be read")[2]
            else:
                # null stands for NaN
                assert found == value or (found is None and value != value), name


@pytest.mark.extended
def test_folders_tables_and_buckets_give_the_rows_of_one_process(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path
) -> None:
    paths = write_images(tmp_path / "photos", 200)
    names = [str(path) for path in paths]
    predictor = vit.Predictor(tiny_model_file, device="cpu", precision="float32", embeddings=True)
    expected = predictor(names)
    table = [{"image": {"bytes": path.read_bytes(), "path": None}} for path in paths]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "photos.parquet", row_group_size=50)

    def predict(place: object, output: object, *options: str) -> str:
        command = ("predict", tiny_model_file, place, *RAY, *FLOAT32, "--embeddings", *options)
        return cli.finish(cli.start(*command, "--output", output)).out

    said = predict(tmp_path / "photos", tmp_path / "a")
    assert "201 images, 1 of them unreadable" in said
    rows = read_rows(tmp_path / "a")
    check_rows({name: rows[name] for name in names}, expected)
    predict(tmp_path / "photos.parquet", tmp_path / "b")
    check_rows(dict(sorted(read_rows(tmp_path / "b").items())), expected)
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for path in paths:
            tar.add(path, path.name)
    predict(tmp_path / "0.tar", tmp_path / "c")
    check_rows(dict(sorted(read_rows(tmp_path / "c").items())), expected)
    # all have rows
    assert predict(tmp_path / "0.tar", tmp_path / "c", "--resume").startswith("0 images")
    with serve_s3() as client:
        bucket = Bucket("photos", client)
        for path in paths:
            bucket.put(f"new/{path.name}", path)
        predict("s3://photos/new/", "s3://photos/rows")
        import fsspec

        rows = read_rows("photos/rows", filesystem=fsspec.filesystem("s3"))
        assert next(iter(sorted(rows))) == "s3://photos/new/00000.png"
        check_rows(dict(sorted(rows.items())), expected)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster that runs already; the variable of the environment that names it."""
    port = "26379"
    # without tokens, which are made once for a user
    environment = {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_AUTH_MODE": "disabled"}
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    options = ["--port", port, "--num-cpus", "2", "--include-dashboard", "false", "--temp-dir", "/tmp/vr"]  # fmt: skip
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(
        [*head, *options], env=os.environ | {"RAY_AUTH_MODE": "disabled"}, **streams
    ) as process:
        try:
            yield environment
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.extended
def test_maps_of_a_cluster_are_those_of_one_process(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
    paths = write_images(tmp_path / "photos", 20)
    command = ("explain", tiny_model_file, tmp_path / "photos", "--method", "gae,rollout")
    alone = tmp_path / "alone"
    direct = vit.explain(
        tiny_model_file, paths, methods=("gae", "rollout"), device="cpu", output=alone
    )
    time.sleep(5)
    running = cli.start(*command, *RAY, "--device", "cpu", "-o", tmp_path / "maps", env=cluster)
    assert "21 images, 1 of them unreadable" in cli.finish(running).out
    rows = read_rows(tmp_path / "maps")
    assert rows[str(tmp_path / "photos" / "broken.png")]["error"] == direct.unreadable[0][1]
    for image in direct.images:
        row = rows[image.item.path]
        for found, result in zip(row["maps"], image.maps, strict=True):
            assert found["method"] == result.method.name
            assert np.array_equal(np.float32(found["values"]), result.values)
            with (
                Image.open(io.BytesIO(found["overlay"])) as picture,
                Image.open(alone / f"{result.key}.png") as expected,
            ):
                assert picture.tobytes() == expected.tobytes()


def find_workers(job: subprocess.Popen[Any]) -> list[psutil.Process]:
    children = psutil.Process(job.pid).children(recursive=True)
    return [child for child in children if "_Worker" in " ".join(child.cmdline())]


@pytest.mark.chaos
def test_killed_workers_and_jobs_lose_and_double_nothing(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path
) -> None:
    paths = write_images(tmp_path / "photos", 9000)
    command = ("predict", tiny_model_file, tmp_path / "photos", *RAY, *FLOAT32, "--resume")
    output = tmp_path / "rows"

    def start() -> subprocess.Popen[Any]:
        return cli.start(*command, "--output", output)

    def wait_for_parts(job: subprocess.Popen[Any], count: int) -> None:
        deadline = time.monotonic() + 120
        while len(list(output.glob("*.parquet"))) < count:
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    job = start()
    wait_for_parts(job, 1)
    killed = find_workers(job)[0]
    killed.kill()
    wait_for_parts(job, 3)
    tree = psutil.Process(job.pid).children(recursive=True)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    psutil.wait_procs(tree, timeout=60)
    num_written = len(read_rows(output))
    assert 0 < num_written < len(paths)

    said = cli.finish(start()).out
    rows = read_rows(output)
    assert rows.keys() == set(map(str, paths))
    assert said.startswith(f"{len(paths) - num_written:,} images")
