"""A run whose images are decoded as it goes: it resumes exactly, and its duplicates are found when it
is evaluated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.training.conftest import MakeRun, run_until
from tests.training.test_resume import assert_equal_runs
from vit.bundle import load_bundle
from vit.config import dump_config
from vit.data import statistics
from vit.data.open import open_dataset
from vit.data.preprocess import IMAGENET_MEAN
from vit.evaluation.images import find_training_hashes
from vit.training import data as building
from vit.training.observers import Observer
from vit.training.resolve import resolve_config
from vit.training.run_directory import CONFIG_FILE

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
        f"data.root={folder / 'images'}",
        "data.pipeline=workers",
        "data.workers=0",
    ]
    return [*data, "train.batch_size=8", "train.epochs=2", "train.checkpoint_every_steps=1"]


@pytest.fixture(autouse=True)
def cache(empty_cache: Path) -> Path:
    return empty_cache


class Messages(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def whole(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that was not killed, and its overrides."""
    folder = tmp_path_factory.mktemp("whole")
    overrides = write_images(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIT_CACHE", str(folder / "cache"))
        make_run(folder / "run", *overrides).trainer.train()
    return folder / "run", overrides


@pytest.mark.parametrize("step", [1, 4, 8, 13])
def test_a_run_killed_at_any_step_ends_as_if_it_were_not(
    make_run: MakeRun, whole: tuple[Path, list[str]], tmp_path: Path, step: int
) -> None:
    directory, overrides = whole
    run_until(make_run(tmp_path / "killed", *overrides), step)
    resumed = make_run(tmp_path / "killed", *overrides, f"data.cache_dir={tmp_path / 'new'}")
    assert resumed.trainer.resume() == (step > 1)
    assert resumed.trainer.progress.step == step - 1
    resumed.trainer.train()
    assert_equal_runs(directory, tmp_path / "killed")
    ended = [load_bundle(run) for run in (directory, tmp_path / "killed")]
    assert ended[0].metadata["run_id"] == ended[1].metadata["run_id"]
    assert ended[0].data == ended[1].data


def test_unreadable_images_are_named_where_they_are_met(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    damaged = tmp_path / "images" / "train" / "a" / "098.png"
    run, messages = make_run(tmp_path / "run", *overrides), Messages()
    train = run.data.splits.split("train")
    validation = run.data.splits.split("validation")
    damaged = tmp_path / "images" / validation.ids[0]
    damaged.write_text("text")
    run.trainer.observers.append(messages)
    with pytest.raises(ValueError, match=r"more than the allowed fraction of 0\.05"):
        run.trainer.train()  # one of ten validation images
    assert sorted(text.partition(": ")[0] for text in messages.texts if "skipped" in text) == [
        f"skipped train image {name}" for name in sorted((train.ids[DAMAGED], train.ids[TEXT]))
    ]
    more = ["data.max_unreadable_fraction=0.1"]
    run, messages = make_run(tmp_path / "other", *overrides, *more), Messages()
    run.trainer.observers.append(messages)
    run.trainer.train()
    assert len([text for text in messages.texts if text.startswith("skipped train image ")]) == 2
    (text,) = [text for text in messages.texts if text.startswith("skipped validation image ")]
    assert text.startswith(f"skipped validation image {validation.ids[0]}: ")


def test_training_hashes_are_computed_when_the_model_is_evaluated(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", *overrides)
    run.trainer.train()
    bundle = load_bundle(tmp_path / "run")
    assert bundle.training_hashes is None
    hashes = find_training_hashes(bundle)
    assert hashes is not None
    assert hashes.shape == (2, 88)
    test = tmp_path / "images" / "test" / "a"
    (test / "copy.png").write_bytes((tmp_path / "images" / run.data.train.ids[3]).read_bytes())
    overlap = vit.evaluate(bundle, device="cpu").evaluation.duplicates_of_training
    assert overlap is not None
    assert (overlap.exact, overlap.examples) == (1, ["test/a/copy.png"])


def test_hashes_of_training_images_that_are_gone_are_unknown(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    make_run(tmp_path / "run", *overrides).trainer.train()
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    assert find_training_hashes(load_bundle(tmp_path / "run")) is None


def test_nothing_but_a_sample_is_decoded_before_the_first_step(
    make_run: MakeRun, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # of which one looks for images of more than 8 bits, and the other measures the mean
    monkeypatch.setattr(statistics, "_FIRST_SAMPLE", 4)
    monkeypatch.setattr(building, "_SAMPLED_IMAGES", 5)
    opened: list[str] = []
    reader = type(make_run(tmp_path / "run", *overrides).data.train.reader)
    original: Callable[..., Any] = reader.image
    monkeypatch.setattr(
        reader,
        "image",
        lambda self, index: opened.append(self.paths[index]) or original(self, index),
    )
    run = make_run(tmp_path / "run", *overrides)
    assert len(opened) <= 9
    assert run.data.preprocess.mean != IMAGENET_MEAN
    assert all(0.45 < mean < 0.55 for mean in run.data.preprocess.mean)
    opened.clear()
    run.trainer.train()
    validation = set(run.data.splits.split("validation").ids)
    first = next(place for place, name in enumerate(opened) if name in validation)
    assert first >= 88  # eleven batches of eight


def test_too_many_damaged_files_end_the_run_with_a_sentence(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", *overrides, "data.max_unreadable_fraction=0.02")
    with pytest.raises(
        ValueError, match=r"2 of 90 images can't be read, more than the allowed fraction of 0\.02"
    ):
        run.trainer.train()


def test_a_resumed_run_takes_the_pipeline_that_was_chosen(
    make_run: MakeRun, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = [*overrides, "data.pipeline=auto"]
    monkeypatch.setattr("vit.data.loader.MAX_MEMORY_FRACTION", 1e-9)
    run = make_run(tmp_path / "run", *choose)
    monkeypatch.undo()
    assert run.config.data.pipeline == "workers"
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / CONFIG_FILE).write_text(dump_config(run.config))
    resumed = resolve_config(
        run.config,
        ["data.pipeline=auto"],
        tmp_path / "run",
        resume=True,
    )
    assert resumed.data.pipeline == "workers"
    assert make_run(tmp_path / "other", *choose).config.data.pipeline == "resident"
