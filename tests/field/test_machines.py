"""Machines that people have: web apps, file systems without locks, small shared memory, drives that
fail, many cores, user ids without a name. Each trains, or says the cause and the remedy."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import TINY_RUN, Launcher, save_noise
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.workers import count_workers
from vit.runtime.locks import lock_file

SMALL = [
    "data.name=folder",
    "data.image_size=16",
    "model.patch_size=8",
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "train.batch_size=8",
    "train.epochs=2",
    "train.device=cpu",
    "train.precision=float32",
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of noise, 16 images each."""
    folder = tmp_path_factory.mktemp("images") / "photos"
    names = [f"{name}/{number:02}.png" for name in ("cat", "dog") for number in range(16)]
    save_noise(folder, names, size=(16, 16))
    return folder


def fail_with(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_training_in_another_thread_leaves_signals_alone(empty_yaml: Path, tmp_path: Path) -> None:
    handlers = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    runs: list[Any] = []

    def train() -> None:
        overrides = [*TINY_RUN, "train.max_steps=3"]
        runs.append(vit.train(empty_yaml, output=tmp_path / "run", overrides=overrides))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert runs[0].steps == 3
    assert handlers == [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]


class TestNoLocks:
    @pytest.mark.parametrize(
        "code", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EPROTO, 524]
    )
    def test_one_warning_names_the_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        monkeypatch.setattr(fcntl, "flock", fail_with(code))
        with (
            pytest.warns(UserWarning, match="file system without locks") as caught,
            lock_file(tmp_path / "a.lock") as first,
            lock_file(tmp_path / "b.lock", refusal="it is held") as second,
        ):
            assert (first, second) == (False, False)
        # Python shows one that is repeated once
        (warning,) = {str(each.message) for each in caught}
        assert str(tmp_path) in warning

    def test_with_locks_a_second_holder_is_refused(self, tmp_path: Path) -> None:
        with lock_file(tmp_path / "a.lock") as is_locked:
            assert is_locked
            program = (
                "import sys; from pathlib import Path; from vit.runtime.locks import lock_file\n"
                "with lock_file(Path(sys.argv[1]), refusal='it is held'): pass"
            )
            command = [sys.executable, "-c", program, str(tmp_path / "a.lock")]
            outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "ValueError: it is held" in outcome.stderr

    @pytest.mark.filterwarnings("ignore:.*without locks")
    def test_two_processes_that_decode_at_the_same_time_get_the_same_pixels(
        self, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = open_dataset("folder", root=photos).split("all")
        expected = decode_dataset(source, Preprocess((8, 8)), cache_dir=tmp_path / "alone")
        monkeypatch.setattr(fcntl, "flock", fail_with(errno.ENOLCK))
        both = threading.Barrier(2)
        original = ImageDataset.image

        def wait_and_read(dataset: ImageDataset, index: int) -> Image.Image:
            if index == 0:
                both.wait()
            return original(dataset, index)

        monkeypatch.setattr(ImageDataset, "image", wait_and_read)
        decoded: list[ImageDataset] = []

        def decode() -> None:
            decoded.append(decode_dataset(source, Preprocess((8, 8)), cache_dir=tmp_path / "both"))

        threads = [threading.Thread(target=decode) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for dataset in decoded:
            np.testing.assert_array_equal(dataset.pixels, expected.pixels)
        assert len(decoded) == 2
        # each may leave a folder, and it is whole
        folders = (tmp_path / "both").glob("*x*-*.*[dg]")
        assert {folder.suffix for folder in folders} == {".decoded"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOTCONN, errno.ESTALE])
def test_training_stops_when_a_drive_fails_and_skips_no_images(
    cli: Launcher,
    photos: Path,
    tmp_path: Path,
    empty_yaml: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    def read_image(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", read_image)
    options = [f"data.root={photos}", "data.pipeline=workers", "data.workers=0"]
    outcome = cli.run("train", empty_yaml, *SMALL, *options, "--output", tmp_path / "run")
    assert outcome.code == 2
    last = outcome.err.splitlines()[-1]
    assert re.match(rf"vit: error: .*\d\d.png: {os.strerror(code)}; .*--resume", last)
    assert "skipped" not in outcome.err


@pytest.mark.parametrize(
    ("cores", "processes", "workers"),
    [(192, 8, 16), (192, 1, 16), (64, 8, 8), (2, 8, 1), (16, 1, 16), (4, 1, 4)],
)
def test_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, workers: int
) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert count_workers() == workers
