"""Commands that are killed anywhere, run again, end with the files of those that were not: nothing
is lost, doubled or half-written.

Children of this process are killed (SIGKILL): before a chosen change of the file system, or at a
random time.
"""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import BuildOnce, Launcher, SaveModel
from tests.prediction.test_output import assert_rows_are_close
from tests.training.conftest import read_metrics
from vit.data.preprocess import Preprocess

pytestmark = pytest.mark.chaos

# Kills of each command; VIT_KILLS asks for more.
KILLS = int(os.environ.get("VIT_KILLS", "4"))
# Changes of the file system that a child counts.
CHANGES = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "unlink")
_SIZES = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 3, "num_heads": 2}

Files = dict[str, bytes]


def run_watched(arguments: list[str], *, count: Any, change: int = 0) -> int:
    """Run a command, counting its changes of the file system, and end this process before change
    number `change`. Returns the exit code."""

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            count.value += 1
            if count.value == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*positional, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, watch(getattr(os, name)))
        outcome = Launcher().run(*arguments)
    return outcome.code


def kill(arguments: list[str], *, change: int = 0, seconds: float | None = None) -> bool:
    """Run a command in a child of this process, which is killed before its change number `change`,
    or after these seconds. Returns whether it was."""
    context = get_context("fork")

    def run() -> None:
        os._exit(run_watched(arguments, count=context.Value("q", 0), change=change))

    child = context.Process(target=run)
    child.start()
    child.join(timeout=60 if seconds is None else seconds)
    child.kill()
    child.join()
    return child.exitcode == -signal.SIGKILL


def read_files(directory: Path, *, hidden: bool = False) -> Files:
    """Return the files below a directory, but for those that hold times: TensorBoard's, the metrics
    and checkpoints."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and not {"tensorboard", "checkpoints", "metrics.jsonl"}.intersection(path.parts)
        and (hidden or not any(part.startswith(".") for part in path.relative_to(directory).parts))
    }


def kill_often(arguments: list[str], *, whole: Path, check: Callable[[], None]) -> None:
    """Run a command into `whole`, and kill others of it; `arguments` names where those write.
    `check` is called after each."""
    # In this process, so that the children have imported everything.
    count = get_context("fork").Value("q", 0)
    started_at = time.monotonic()
    assert not run_watched([text.replace("OUTPUT", str(whole)) for text in arguments], count=count)
    duration = time.monotonic() - started_at
    broken = [text.replace("OUTPUT", str(whole.with_name("broken"))) for text in arguments]
    rng = random.Random(0)
    num_killed = 0
    for number in range(KILLS):
        if number % 2 or not count.value:
            num_killed += kill(broken, seconds=rng.random() * min(duration, 2) / 4)
        else:
            num_killed += kill(broken, change=rng.randint(1, count.value))
        check()
    assert num_killed


@pytest.fixture(scope="module")
def weights(build_once: BuildOnce, save_model: SaveModel) -> Path:
    """A model of three blocks, of other classes."""

    def build(folder: Path) -> None:
        save_model(folder / "model.safetensors", preprocess=Preprocess((8, 8)), **_SIZES)

    return build_once("killed_weights", build) / "model.safetensors"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for number in range(40):
        path = tmp_path / "photos" / f"class {number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 128, (8, 8, 3)) + 100 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "photos"


def test_training_of_pretrained_weights(cli: Launcher, weights: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    arguments = [
        "train", "folder/finetune", "data.name=digits", "data.classes=[0,1,2]",
        "data.image_size=8", "data.crop_pct=1", "train.device=cpu", "train.precision=float32",
        "train.epochs=3", "train.batch_size=64", "optimizer.lr=1e-3",
        "train.checkpoint_every_steps=2", f"--init={weights}", "--resume", "--output", "OUTPUT",
    ]  # fmt: skip
    kill_often(arguments, whole=whole, check=lambda: None)
    cli.succeed(*arguments[:-1], broken)
    assert read_files(broken, hidden=True) == read_files(whole, hidden=True)
    steps = [
        [path.name[:13] for path in sorted(run.glob("checkpoints/*"))] for run in (whole, broken)
    ]
    assert steps[0] == steps[1]
    assert read_metrics(whole) == read_metrics(broken)


def assert_equal_rows(text: bytes, expected: bytes) -> None:
    """Assert that rows are the first ones of others. A resumed command begins with another image,
    and batches of other sizes have other last bits."""
    lines = text.splitlines()
    for line, other in zip(lines, expected.splitlines()[: len(lines)], strict=True):
        assert_rows_are_close(json.loads(line), json.loads(other))


def test_predictions_are_resumed(
    cli: Launcher,
    tiny_run: Path,
    photos: Path,
    tmp_path: Path,
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for directory in (whole, broken):
        directory.mkdir()
    arguments = [
        "predict", str(tiny_run), str(photos), "--device=cpu", "--batch-size=4", "--resume",
        "--output=OUTPUT/rows.jsonl",
    ]  # fmt: skip

    def check() -> None:
        # the last row may be being written
        text = read_files(broken).get("rows.jsonl", b"")
        assert_equal_rows(text[: text.rfind(b"\n") + 1], read_files(whole)["rows.jsonl"])

    kill_often(arguments, whole=whole, check=check)
    cli.succeed(*[text.replace("OUTPUT", str(broken)) for text in arguments])
    files, expected = read_files(broken), read_files(whole)
    assert_equal_rows(files["rows.jsonl"], expected["rows.jsonl"])
    assert list(files) == list(expected) == ["rows.jsonl"]
    assert all(text.count(b"\n") == 40 for text in (*files.values(), *expected.values()))


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "PHOTOS", "--model=WEIGHTS", "--device=cpu"],
        ["export", "WEIGHTS", "--format=timm"],
    ],
    ids=" ".join,
)
def test_results_that_replace_earlier_ones(
    cli: Launcher,
    weights: Path,
    tiny_run: Path,
    photos: Path,
    tmp_path: Path,
    arguments: list[str],
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    places = {"PHOTOS": photos, "WEIGHTS": weights, "RUN": tiny_run}
    for name, place in places.items():
        arguments = [text.replace(name, str(place)) for text in arguments]
    arguments = [*arguments, "--overwrite", "--output", "OUTPUT"]
    # an earlier result
    (broken / "pages").mkdir(parents=True)
    (broken / ".vit-output").touch()
    earlier = {"pages/a.html": b"earlier", "result.json": b"earlier"}
    for name, content in earlier.items():
        (broken / name).write_bytes(content)

    def check() -> None:
        expected = read_files(whole)
        left = read_files(broken)
        assert left.items() <= {**expected, **earlier}.items()
        shutil.rmtree(broken)
        shutil.copytree(kept, broken)

    kept = shutil.copytree(broken, tmp_path / "kept")
    kill_often(arguments, whole=whole, check=check)
    cli.succeed(*[text.replace("OUTPUT", str(broken)) for text in arguments])
    assert read_files(broken, hidden=True) == read_files(whole, hidden=True)
