"""A full disk, a cache that cannot be written, a clock that goes backwards, streams that are closed,
too little memory, a signal: one line, nothing half, the same result."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import TINY_RUN, Launcher
from tests.evaluation.records import write_evaluation
from vit.bundle import Bundle
from vit.training.run_directory import open_run_directory
from vit.training.train_step import TrainStep


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing can be flushed to disk any more."""

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate"],
        ["explain", "--num-images", "2", "--no-checks"],
        ["export", "--format", "timm"],
        ["train"],
    ],
    ids=" ".join,
)
def test_a_full_disk_is_one_line_and_leaves_nothing_half(
    cli: Launcher,
    tiny_run: Path,
    empty_yaml: Path,
    tmp_path: Path,
    full_disk: None,
    command: list[str],
) -> None:
    name, *options = command
    model = [empty_yaml, *TINY_RUN] if name == "train" else [tiny_run]
    device = [] if name in ("train", "export") else ["--device", "cpu"]
    assert "No space left on device" in cli.fail(
        name, *model, *options, *device, "--output", tmp_path / "out"
    )
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    known = {".vit-output", ".lock"} | {
        name for name in left if name.startswith("events.out") or name.endswith(".png")
    }
    assert left <= known


@pytest.mark.parametrize("kind", ["a file", "full"])
def test_a_cache_that_cannot_be_written_is_one_line(
    cli: Launcher, empty_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = tmp_path / "cache"
    if kind == "a file":
        cache.touch()
    else:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", fail)
    message = cli.fail(
        "train", empty_yaml, *TINY_RUN, f"data.cache_dir={cache}", "--output", tmp_path / "run"
    )
    assert "File exists" in message or "No space left" in message


@pytest.mark.chaos
def test_two_sigterms_end_a_run_at_once_and_it_is_resumed_to_the_same_bytes(
    cli: Launcher, tiny_run: Path, empty_yaml: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = cli.start("train", empty_yaml, *TINY_RUN, "--output", run)
    while process.poll() is None and not list(run.glob("checkpoints/step-*.pt")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (75, -signal.SIGTERM)  # 75: the first one had already saved
    cli.succeed("train", "--resume", "--output", run)
    assert (run / "model.safetensors").read_bytes() == (tiny_run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("step", [3, 9])
def test_an_image_damaged_while_training_reads_it_is_named_and_when_it_is_whole_again_training_goes_on(
    cli: Launcher,
    empty_yaml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
) -> None:
    """In the first epoch, of six steps, images are read for the first time."""
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "images" / f"class {number % 2}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    tiny = [
        text
        for text in TINY_RUN
        if not text.startswith(("data.name", "train.batch_size", "train.epochs"))
    ]
    images = [
        "data.name=folder",
        f"data.root={tmp_path / 'images'}",
        "data.pipeline=workers",
        "data.workers=1",
    ]
    images += ["train.batch_size=4", "train.epochs=3", "train.checkpoint_every_steps=1"]
    command = ["train", empty_yaml, *tiny, *images, "--output"]
    cli.succeed(*command, tmp_path / "whole")
    kept, whole_step, steps = {}, TrainStep.__call__, count(1)

    def damage(self: TrainStep, *arguments: object) -> object:
        if next(steps) == step:
            kept.update({path: path.read_bytes() for path in (tmp_path / "images").rglob("*.png")})
            for path in kept:
                path.write_bytes(kept[path][:50])
        return whole_step(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", damage)
        outcome = cli.run(*command, tmp_path / "run")
        assert outcome.code == 2
        assert "png can't be read" in outcome.err.splitlines()[-1]
        assert "Traceback" not in outcome.err
    for path, content in kept.items():
        path.write_bytes(content)
    cli.succeed("train", "--resume", "--output", tmp_path / "run")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "run")]
    assert weights[0] == weights[1]


def test_an_output_that_is_full_is_one_line(cli: Launcher) -> None:
    with open("/dev/full", "w") as full:
        process = cli.start("recipes", stdout=full)
        _, err = process.communicate(timeout=60)
    assert err == "vit: error: No space left on device\n"
    assert process.returncode == 2


def test_the_home_directory_may_be_written_as_a_tilde(
    cli: Launcher, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_evaluation(tmp_path, name, np.arange(8) % 3)
    cli.succeed("compare", "a", "b", "--output", "~/compared")
    vit.predict(tiny_bundle, np.zeros((8, 8, 3), np.uint8)).save("~/predicted")
    assert (tmp_path / "compared" / "comparison.json").is_file()
    assert (tmp_path / "predicted").is_dir()
    assert not (tmp_path / "~").exists()


def test_a_signal_leaves_no_temporary_file(
    cli: Launcher, tmp_path: Path, tiny_model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(_: object, path: Path, *__: object) -> None:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("vit.deploy.export.python_formats.save_file", save)
    outcome = cli.run("export", tiny_model_file, "--format", "timm", "--output", tmp_path / "out")
    assert outcome.code == 128 + signal.SIGTERM
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".vit-output"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_temporary_files_of_a_run_that_was_killed_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".model.safetensors.0123abcd.tmp"
    leftover.touch()
    with open_run_directory(tmp_path, resume=True, overwrite=False):
        assert not leftover.exists()
