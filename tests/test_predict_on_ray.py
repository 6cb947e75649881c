"""A cluster of this machine's cores gives the rows of one process, each once, whatever is killed."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as arrow
import pyarrow.parquet as pq
import pytest

import vit
from tests.conftest import Launcher, save_noise

PROGRAM = Path(__file__).parents[1] / "docs" / "cluster" / "predict_on_ray.py"
OPTIONS = ("--precision", "float32", "--device", "cpu")


def write_images(folder: Path, count: int, *, side: int = 8) -> list[Path]:
    """Noise in two folders, and a file that is no image."""
    names = [f"{'ab'[number % 2]}/{number:05d}.png" for number in range(count)]
    save_noise(folder, names, size=(side, side))
    (folder / "broken.png").write_bytes(b"no image")
    return sorted(folder.rglob("*.png"))


def read_rows(place: Path) -> dict[str, dict[str, Any]]:
    """Path → row, each once."""
    rows = arrow.dataset(place, format="parquet").to_table().to_pylist()
    by_path = {row["path"]: row for row in rows}
    assert len(by_path) == len(rows)
    return by_path


@pytest.mark.extended
def test_folders_tables_and_parquet_give_the_rows_of_one_process(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path
) -> None:
    paths = write_images(tmp_path / "photos", 60)
    expected = vit.Predictor(tiny_model_file, device="cpu", precision="float32")(
        list(map(str, paths))
    )
    (tmp_path / "photos.csv").write_text("path\n" + "\n".join(map(str, paths)))
    rows = [{"path": str(path), "image": path.read_bytes()} for path in paths]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "photos.parquet")

    for name in ("photos", "photos.csv", "photos.parquet"):
        output = tmp_path / f"rows of {name}"
        command = (tiny_model_file, tmp_path / name, *OPTIONS, "--output", output)
        cli.finish(cli.start(*command, program=(PROGRAM,)))
        found = read_rows(output)
        assert found.keys() == set(map(str, paths))
        for place, path in enumerate(map(str, paths)):
            row = found[path]
            if path.endswith("broken.png"):
                assert "can't be read" in row["error"]
                continue
            assert row["error"] is None
            assert row["predicted"] == expected[place].predicted
            probabilities = expected[place].probabilities
            np.testing.assert_allclose(row["probabilities"], probabilities, atol=1e-6)


@pytest.mark.chaos
def test_killed_jobs_lose_and_double_nothing(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path
) -> None:
    # enough bytes for several blocks, of which each becomes a file
    paths = write_images(tmp_path / "photos", 1500, side=100)
    output = tmp_path / "rows"
    command = (tiny_model_file, tmp_path / "photos", *OPTIONS, "--output", output)

    job: subprocess.Popen[Any] = cli.start(*command, program=(PROGRAM,))
    deadline = time.monotonic() + 240
    while not list(output.glob("*.parquet")):
        assert job.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tree = psutil.Process(job.pid).children(recursive=True)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    psutil.wait_procs(tree, timeout=60)
    # a part that was cut
    whole = next(output.glob("*.parquet")).read_bytes()
    (output / "cut.parquet").write_bytes(whole[: len(whole) // 2])

    refused = cli.start(*command, program=(PROGRAM,))
    assert "--resume" in refused.communicate(timeout=300)[1]
    assert refused.returncode == 2
    cli.finish(cli.start(*command, "--resume", program=(PROGRAM,)))
    assert read_rows(output).keys() == set(map(str, paths))
