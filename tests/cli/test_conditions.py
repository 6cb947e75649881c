"""A full disk, a cache that cannot be written, a clock that goes backwards, streams that are closed,
too little memory, a signal: one line, nothing half, the same result."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import vit
from tests.conftest import TINY_RUN, Launcher
from tests.evaluation.records import write_evaluation
from vit.bundle import Bundle


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
    ],
    ids=" ".join,
)
def test_a_full_disk_is_one_line_and_leaves_nothing_half(
    cli: Launcher,
    tiny_run: Path,
    tmp_path: Path,
    full_disk: None,
    command: list[str],
) -> None:
    name, *options = command
    message = cli.fail(name, tiny_run, *options, "--output", tmp_path / "out")
    assert "No space left on device" in message
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert left <= {".vit-output", *(name for name in left if name.endswith(".png"))}


def test_a_cache_that_is_a_file_is_one_line(
    cli: Launcher, empty_yaml: Path, tmp_path: Path, empty_cache: Path
) -> None:
    empty_cache.touch()
    command = ("train", empty_yaml, *TINY_RUN, "--output", tmp_path / "run")
    assert "File exists" in cli.fail(*command)


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
    def rename(path: Path, _: Path) -> None:
        assert path.is_file()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("vit.runtime.files.rename_durably", rename)
    outcome = cli.run("export", tiny_model_file, "--format", "timm", "--output", tmp_path / "out")
    assert outcome.code == 128 + signal.SIGTERM
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".vit-output"]
