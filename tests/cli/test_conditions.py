"""A full disk, a cache that cannot be written, a clock that goes backwards: one line, nothing half, the same result."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.conftest import TINY_RUN, Launcher


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
        ["attention", "--images", "2", "--no-checks"],
        ["export", "--to", "timm"],
        ["export", "--to", "torch-export"],
        ["train"],
    ],
    ids=" ".join,
)
def test_a_full_disk_is_one_line_and_leaves_nothing_half(
    cli: Launcher, tiny_run: Path, empty_yaml: Path, tmp_path: Path, full_disk: None, command: list[str]
) -> None:
    name, *options = command
    model = [empty_yaml, *TINY_RUN] if name == "train" else [tiny_run]
    device = [] if name in ("train", "export") else ["--device", "cpu"]
    assert "No space left on device" in cli.fail(name, *model, *options, *device, "--output", tmp_path / "out")
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    known = {".vit-output", ".lock"} | {name for name in left if name.startswith("events.out") or name.endswith(".png")}
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
    message = cli.fail("train", empty_yaml, *TINY_RUN, f"data.cache_dir={cache}", "--output", tmp_path / "run")
    assert "File exists" in message or "No space left" in message


def test_a_clock_that_goes_backwards_changes_no_result(
    cli: Launcher, tiny_run: Path, empty_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = count(2_000_000_000, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    cli.succeed("train", empty_yaml, *TINY_RUN, "--output", tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (tiny_run / "model.safetensors").read_bytes()


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
