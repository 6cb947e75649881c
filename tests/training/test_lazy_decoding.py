"""A run whose images are decoded as it goes: it resumes exactly, and its duplicates are found when it
is evaluated."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.conftest import MakeRun, run_until
from tests.training.test_resume import assert_equal_runs
from vit.bundle import load_bundle
from vit.data.open import open_dataset

pytestmark = pytest.mark.filterwarnings("ignore:skipped train image")
DAMAGED, TEXT = 20, 70  # in the training split


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    return write_images(tmp_path)


def write_images(folder: Path) -> list[str]:
    """90 training images in two classes, of which one is cut off behind its header and one is a
    text. The overrides of a run that decodes them as it goes."""
    rng = np.random.default_rng(0)
    for number in range(110):
        file = (
            folder
            / "images"
            / ("train" if number < 100 else "test")
            / "ab"[number % 2]
            / f"{number:03d}.png"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(file)
    names = open_dataset("folder", root=folder / "images").split("train").ids
    for name, content in ((names[DAMAGED], file.read_bytes()[:150]), (names[TEXT], b"text")):
        (folder / "images" / name).write_bytes(content)
    data = [
        "data.name=folder",
        "data.classes=null",
        f"data.root={folder / 'images'}",
        "data.pipeline=workers",
        "data.workers=0",
    ]
    return [*data, "train.batch_size=8", "train.epochs=2", "train.checkpoint_every_steps=1"]


@pytest.fixture(autouse=True)
def cache(empty_cache: Path) -> Path:
    return empty_cache


@pytest.fixture(scope="module")
def whole(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that was not killed, and its overrides."""
    folder = tmp_path_factory.mktemp("whole")
    overrides = write_images(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIT_CACHE", str(folder / "cache"))
        make_run(folder / "run", *overrides).trainer.train()
    return folder / "run", overrides


def test_a_run_killed_again_and_again_ends_as_if_it_were_not(
    make_run: MakeRun,
    whole: tuple[Path, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, overrides = whole
    run = make_run(tmp_path / "killed", *overrides)
    for step in (1, 4, 8, 13):
        run_until(run, step)
        monkeypatch.setenv("VIT_CACHE", str(tmp_path / f"new{step}"))
        run = make_run(tmp_path / "killed", *overrides)
        assert run.trainer.resume() == (step > 1)
        assert run.trainer.progress.step == step - 1
    run.trainer.train()
    assert_equal_runs(directory, tmp_path / "killed")
    ended = [load_bundle(run) for run in (directory, tmp_path / "killed")]
    assert ended[0].metadata["run_id"] == ended[1].metadata["run_id"]
    assert ended[0].data == ended[1].data


def test_unreadable_images_are_named_where_they_are_met(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    splits = make_run(tmp_path / "run", *overrides).data.splits
    train, validation = splits.split("train"), splits.split("validation")
    (tmp_path / "images" / validation.ids[0]).write_text("text")
    # one of ten validation images
    with pytest.raises(ValueError, match=r"more than the allowed fraction of 0\.05"):
        make_run(tmp_path / "refused", *overrides)
    more = ["data.max_unreadable_fraction=0.1"]
    run = make_run(tmp_path / "other", *overrides, *more)
    assert [name for name, _ in run.data.validation.unreadable] == [validation.ids[0]]
    with pytest.warns(UserWarning, match="skipped") as told:
        run.trainer.train()
    texts = [str(warning.message) for warning in told]
    assert sorted(text.partition(": ")[0] for text in texts if "skipped" in text) == [
        f"skipped train image {name}" for name in sorted((train.ids[DAMAGED], train.ids[TEXT]))
    ]
