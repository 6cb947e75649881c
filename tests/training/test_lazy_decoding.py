"""A run whose images are decoded as it goes resumes exactly."""

from pathlib import Path

import pytest

from tests.conftest import save_noise
from tests.training.conftest import MakeRun, run_until
from tests.training.test_resume import assert_equal_runs
from vit.bundle import load_bundle
from vit.data.open import open_dataset

pytestmark = pytest.mark.filterwarnings("ignore:skipped train image")
DAMAGED, EMPTY = 20, 70  # in the training split


def write_images(folder: Path) -> list[str]:
    """90 training images in two classes, of which one is cut off behind its header and one is
    empty. The overrides of a run that decodes them as it goes."""
    places = [f"train/{'ab'[number % 2]}/{number:03d}.png" for number in range(100)]
    save_noise(folder / "images", [*places, "test/a/0.png", "test/b/0.png"], size=(10, 12))
    names = open_dataset("folder", root=folder / "images").split("train").ids
    for name, length in ((names[DAMAGED], 150), (names[EMPTY], 0)):
        path = folder / "images" / name
        path.write_bytes(path.read_bytes()[:length])
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
