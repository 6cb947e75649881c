"""The tables of results say what the result files say, and the scripts run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import time_to_accuracy
import train_throughput
from tables import PAGES, ROOT, build_tables, fill_page

from tests.conftest import save_noise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_show_what_the_result_files_say(page: Path) -> None:
    text = page.read_text()
    assert fill_page(text, build_tables()) == text, "run python benchmarks/tables.py --write"


def test_seeds_are_summarised_by_mean_and_standard_deviation() -> None:
    runs = [
        {"test_top1": 0.8, "test_top1_interval": [0.7, 0.9], "seconds": 10.0},
        {"test_top1": 0.9, "test_top1_interval": [0.8, 1.0], "seconds": 14.0},
    ]
    found = time_to_accuracy.summarise(runs)
    assert found["seeds"] == 2
    assert found["test_top1"]["mean"] == pytest.approx(0.85)
    assert found["test_top1"]["standard_deviation"] == pytest.approx(0.0707, abs=1e-4)
    assert found["test_top1"]["interval"] == pytest.approx([0.75, 0.95])
    assert found["seconds"]["mean"] == 12


def test_rates_are_medians_over_rounds_that_may_have_been_cut_off() -> None:
    found = train_throughput.summarise(
        [{"plain": 10.0, "engine": 30.0}, {"plain": 20.0, "engine": 20.0}, {"plain": 11.0}]
    )
    assert found["variants"]["plain"]["images_per_second"] == 11
    assert found["ratios"] == {"engine / plain": pytest.approx(25 / 11)}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of tiny images in ten classes, with a train and a test split."""
    for split, count in (("train", 260), ("test", 20)):
        names = [f"{split}/class {number % 10}/{number}.png" for number in range(count)]
        save_noise(tmp_path / "images", names, size=(32, 32))
    return tmp_path / "images"


@pytest.mark.extended
def test_the_gpu_day_is_rehearsed_on_a_cpu(images: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(images), "tar", images)
    output = tmp_path / "results"
    own = {"DEVICE": "cpu", "SMALL": "1", "OUT": str(output), "ALL_SECONDS": "1200"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_day.sh"), archive],
        env=os.environ | own | {"PATH": path},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    log = (output / "log.txt").read_text()
    parts = [line for line in log.splitlines() if line.startswith("===== ")]
    assert [line.split()[1] for line in parts] == [
        "attention:",
        "speedrun:",
        "throughput:",
        "tests:",
    ]
    assert all("exit code 0" in line for line in parts[:3]), log
    (attention,) = output.glob("attention-nan-*.json")
    assert json.loads(attention.read_text())["failures"] == []
    (recipe,) = output.glob("recipe-cifar10-speedrun-*.json")
    runs = json.loads(recipe.read_text())["runs"]
    assert [(run["seed"], run["cold"], "test_top1" in run) for run in runs] == [
        (0, True, True),
        (1, False, True),
    ]
    (throughput,) = output.glob("train-throughput-*.json")
    assert set(json.loads(throughput.read_text())["variants"]) == {"resident", "engine"}
