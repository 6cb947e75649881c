"""Machines that people have: web apps, file systems without locks, small shared memory, drives that
fail, many cores, user ids without a name. Each trains, or says the cause and the remedy."""

import errno
import fcntl
import os
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
from tests.conftest import TINY_RUN, Launcher
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.images import list_files, read_image
from vit.data.open import open_dataset
from vit.data.sources.base import read_stats
from vit.model.checkpoint import CheckpointStore
from vit.runtime import drive, locks, machine
from vit.runtime.drive import DriveError, wait_for_drive
from vit.runtime.files import read_bytes, write_text
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
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(16):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
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
        monkeypatch.setattr(locks, "_named", set())
        with (
            pytest.warns(UserWarning, match="file system without locks") as caught,
            lock_file(tmp_path / "a.lock") as first,
            lock_file(tmp_path / "b.lock", refusal="it is held") as second,
        ):
            assert (first, second) == (False, False)
        (warning,) = caught
        assert str(tmp_path) in str(warning.message)

    def test_other_errors_are_raised(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "flock", fail_with(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"), lock_file(tmp_path / "a.lock"):
            pass

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

    def test_a_run_trains(
        self, empty_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fcntl, "flock", fail_with(errno.ENOSYS))
        monkeypatch.setattr(locks, "_named", set())
        overrides = [*TINY_RUN, "train.max_steps=3", f"data.cache_dir={tmp_path / 'cache'}"]
        with pytest.warns(UserWarning, match="without locks") as caught:
            run = vit.train(empty_yaml, output=tmp_path / "run", overrides=overrides)
        assert run.steps == 3
        assert len([each for each in caught if "without locks" in str(each.message)]) == 1

    def test_two_processes_that_decode_at_the_same_time_get_the_same_pixels(
        self, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = open_dataset("folder", root=photos).split("all")
        expected = decode_dataset(source, size=(8, 8), cache_dir=tmp_path / "alone")
        monkeypatch.setattr(fcntl, "flock", fail_with(errno.ENOLCK))
        monkeypatch.setattr(locks, "_named", {tmp_path.stat().st_dev})
        both = threading.Barrier(2)
        original = ImageDataset.image

        def wait_and_read(dataset: ImageDataset, index: int) -> Image.Image:
            if index == 0:
                both.wait()
            return original(dataset, index)

        monkeypatch.setattr(ImageDataset, "image", wait_and_read)
        decoded: list[ImageDataset] = []

        def decode() -> None:
            decoded.append(
                decode_dataset(source, size=(8, 8), cache_dir=tmp_path / "both", progress=False)
            )

        threads = [threading.Thread(target=decode) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for dataset in decoded:
            np.testing.assert_array_equal(dataset.pixels, expected.pixels)
        assert len(decoded) == 2
        folders = [entry for entry in (tmp_path / "both").iterdir() if entry.is_dir()]
        assert len(folders) == 1


class TestDrive:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Seconds that were waited, which pass at once."""
        seconds = [0.0]

        def sleep(duration: float) -> None:
            seconds[0] += duration

        monkeypatch.setattr(drive.time, "sleep", sleep)
        return seconds

    @pytest.fixture
    def break_drive(
        self, clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., None]:
        """break_drive(code, seconds): opening, listing and looking at files fails for so long."""

        def break_drive(code: int, seconds: float, *suffixes: str) -> None:
            for name in ("open", "scandir", "stat"):
                original = getattr(os, name)

                def failing(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                    name = str(args[0])
                    is_photo = "photos" in name and name.endswith(suffixes or (".png", "cat"))
                    if is_photo and clock[0] < seconds:
                        raise OSError(code, os.strerror(code), str(args[0]))
                    return original(*args, **kwargs)

                monkeypatch.setattr(os, name, failing)

        return break_drive

    @pytest.mark.parametrize(
        "code", [errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ECONNABORTED, errno.EREMOTEIO]
    )
    def test_half_a_minute_is_waited_for(
        self, photos: Path, break_drive: Callable[..., None], clock: list[float], code: int
    ) -> None:
        path = photos / "cat" / "00.png"
        expected = read_image(path).tobytes()
        for read in (
            lambda: read_image(path).tobytes() == expected,
            lambda: len(read_bytes(path)) == path.stat().st_size,
            lambda: len(list(list_files(photos))) == 32,
            lambda: read_stats([str(path)])[0, 0] > 0,
        ):
            clock[0] = 0.0
            with pytest.MonkeyPatch.context():
                break_drive(code, 30)
                with pytest.warns(UserWarning, match="waiting up to 120 seconds") as caught:
                    assert read()
            assert len(caught) == 1
            assert 30 <= clock[0] < 45

    def test_an_error_while_pixels_are_read_is_no_broken_image(
        self, photos: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = photos / "cat" / "00.png"
        expected = read_image(path).tobytes()
        original = Image.Image.load

        def load(image: Image.Image) -> Any:
            if clock[0] < 5:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(image)

        monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
        with pytest.warns(UserWarning, match="Input/output error"):
            read_image(path)
        monkeypatch.undo()
        assert read_image(path).tobytes() == expected

    def test_after_two_minutes_it_ends_with_advice(self, clock: list[float]) -> None:
        with (
            pytest.warns(UserWarning, match="waiting"),
            pytest.raises(DriveError, match=r"/x: Input/output error.*--resume") as caught,
        ):
            wait_for_drive(fail_with(errno.EIO), "/x")
        assert not isinstance(caught.value, OSError | ValueError)
        assert 120 <= clock[0] <= 140

    def test_other_errors_are_raised_at_once(self, clock: list[float], tmp_path: Path) -> None:
        for code in (errno.ENOENT, errno.EACCES, errno.ENOSPC, errno.EROFS):
            with pytest.raises(OSError, match=os.strerror(code)):
                wait_for_drive(fail_with(code), "/x")
        assert clock == [0.0]

    def test_a_checkpoint_is_written_when_the_drive_is_back(
        self, tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fsync(_: int) -> None:
            if clock[0] < 30:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.warns(UserWarning, match="waiting"):
            path = CheckpointStore(tmp_path).save(memoryview(b"content"), step=1, best_step=0)
        assert path.read_bytes() == b"content"
        assert list(tmp_path.iterdir()) == [path]
        write_text(tmp_path / "text", "a")

    def test_training_goes_on_with_the_same_images_or_stops(
        self,
        cli: Launcher,
        photos: Path,
        tmp_path: Path,
        empty_yaml: Path,
        break_drive: Callable[..., None],
    ) -> None:
        options = [f"data.root={photos}", "data.pipeline=workers", "data.workers=0"]
        train = ["train", empty_yaml, *SMALL, *options, "--output"]
        cli.succeed(*train, tmp_path / "good")
        break_drive(errno.ENOTCONN, 30, ".png")
        with pytest.warns(UserWarning, match=r"\d\d\.png: .* waiting up to 120 seconds"):
            outcome = cli.succeed(*train, tmp_path / "waited")
        assert "skipped" not in outcome.err
        weights = [
            (tmp_path / name / "model.safetensors").read_bytes() for name in ("good", "waited")
        ]
        assert weights[0] == weights[1]

        break_drive(errno.ENOTCONN, 1e9, ".png")
        with pytest.warns(UserWarning, match="waiting up to"):
            outcome = cli.run(*train, tmp_path / "stopped")
        assert outcome.code == 2
        assert outcome.err.splitlines()[-1].startswith("vit: error: ")
        assert "--resume" in outcome.err
        assert "skipped" not in outcome.err
        assert not (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    ("cores", "processes", "workers"),
    [(192, 8, 16), (192, 1, 16), (64, 8, 8), (2, 8, 1), (16, 1, 16), (4, 1, 4)],
)
def test_processes_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, workers: int
) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert machine.count_workers() == workers
