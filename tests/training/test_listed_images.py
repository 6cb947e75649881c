"""A run whose images are decoded as it goes: known before its first epoch has ended, whole when it has."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.training.conftest import MakeRun, run_until
from tests.training.test_resume import assert_equal_runs
from vit.build import data as building
from vit.bundle import load_bundle
from vit.data.cache import decode_dataset
from vit.data.images import IMAGENET_MEAN
from vit.data.open import open_dataset
from vit.training.observers import Observer

DAMAGED, TEXT = 20, 70  # in the training split


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """90 training images in two classes, of which one is cut off behind its header and one is a text."""
    rng = np.random.default_rng(0)
    for number in range(110):
        file = tmp_path / "images" / ("train" if number < 100 else "test") / "ab"[number % 2] / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(file)
    names = open_dataset("folder", root=tmp_path / "images").split("train").ids
    for name, content in ((names[DAMAGED], file.read_bytes()[:150]), (names[TEXT], b"text")):
        (tmp_path / "images" / name).write_bytes(content)
    of_data = ["data.name=folder", f"data.root={tmp_path / 'images'}", "data.pipeline=workers", "data.workers=0"]
    return [*of_data, "train.batch_size=8", "train.epochs=2", "train.checkpoint_every_steps=1"]


@pytest.fixture(autouse=True)
def cache(empty_cache: Path) -> Path:
    return empty_cache


class Messages(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("step", [1, 4, 8, 13])
def test_a_run_killed_in_its_first_epoch_ends_as_if_it_were_not(
    make_run: MakeRun, overrides: list[str], tmp_path: Path, cache: Path, step: int
) -> None:
    whole = make_run(tmp_path / "whole", *overrides)
    whole.trainer.run()
    for directory, more in (("warm", "data.workers=0"), ("cold", f"data.cache_dir={tmp_path / 'new'}")):
        run_until(make_run(tmp_path / directory, *overrides, f"data.cache_dir={tmp_path / directory / 'cache'}"), step)
        resumed = make_run(tmp_path / directory, *overrides, more)
        assert resumed.trainer.resume() == (step > 1)
        assert resumed.trainer.progress.step == step - 1
        if step < 10 and directory == "cold":  # eleven steps an epoch
            known = torch.from_numpy(resumed.data.train.state)
            assert (step - 1) * 7 <= int(known.count_nonzero()) < len(known)
        resumed.trainer.run()
        assert_equal_runs(tmp_path / "whole", tmp_path / directory)
        ended = [load_bundle(tmp_path / name) for name in ("whole", directory)]
        assert ended[0].metadata["run_id"] == ended[1].metadata["run_id"]
        assert ended[0].data == ended[1].data


def test_after_the_first_epoch_the_model_file_says_what_a_scan_says(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    run, messages = make_run(tmp_path / "run", *overrides), Messages()
    source = run.data.dataset.split("train")
    assert len(source) == 90
    assert [name for name, _ in run.data.train.unreadable] == [source.ids[TEXT]]  # the header says it
    run.trainer.observers.append(messages)
    run.trainer.run()
    scan = decode_dataset(source, size=None, cache_dir=tmp_path / "other", progress=False)
    recorded = load_bundle(tmp_path / "run")
    assert recorded.data["fingerprint"] == recorded.data["splits"]["train"]["fingerprint"] == scan.fingerprint
    assert recorded.data["splits"]["train"]["num_images"] == len(scan) == len(source) - 2
    assert recorded.data["unreadable"] == 2
    assert recorded.training_hashes is not None
    for ours, theirs in zip(recorded.training_hashes, (scan.digests, scan.perceptual), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (told,) = [text for text in messages.texts if text.startswith("skipped")]
    assert told.startswith(f"skipped train image {source.ids[DAMAGED]}: ")


def test_nothing_but_a_sample_is_decoded_before_the_first_step(
    make_run: MakeRun, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_SAMPLED_IMAGES", 9)
    monkeypatch.setattr("vit.data.listed._SAMPLE", 3)
    opened: list[str] = []
    reader = type(make_run(tmp_path / "run", *overrides).data.train.source.reader)
    original: Callable[..., Any] = reader.open
    monkeypatch.setattr(reader, "open", lambda self, index: opened.append(self.paths[index]) or original(self, index))
    run = make_run(tmp_path / "run", *overrides)
    assert len(opened) <= 9 + 2  # traces of JPEG are looked for in images of 32×32 pixels alone
    assert run.data.preprocess.mean != IMAGENET_MEAN
    assert all(0.45 < mean < 0.55 for mean in run.data.preprocess.mean)
    opened.clear()
    run.trainer.run()
    validation = set(run.data.dataset.split("validation").ids)
    first = next(place for place, name in enumerate(opened) if name in validation)
    assert first >= 88  # eleven batches of eight


def test_too_many_damaged_files_end_the_run_with_a_sentence(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", *overrides, "data.max_unreadable_fraction=0.02")
    with pytest.raises(ValueError, match=r"2 of 90 images can't be read, more than the allowed fraction of 0\.02"):
        run.trainer.run()


def test_a_run_of_an_earlier_version_goes_on_as_it_began(
    make_run: MakeRun, overrides: list[str], tmp_path: Path
) -> None:
    """That decoded every image before the first step, counted those alone that it could read, and normalised them by
    ImageNet's mean. The directory was written by commit d5b0c85: the checkpoint of step 5, and the model of the end."""
    earlier, directory = Path(__file__).parents[1] / "data_files/all-decoded-first", tmp_path / "run"
    shutil.copytree(earlier / "checkpoints", directory / "checkpoints")
    expected = load_file(earlier / "model.safetensors")
    for step in (5, 21):  # from a checkpoint of this version, too
        resumed = make_run(directory, *overrides)
        assert resumed.data.preprocess.mean == IMAGENET_MEAN
        assert resumed.trainer.resume()
        assert resumed.trainer.progress.step == step
        resumed.trainer.run()
        weights = load_file(directory / "model.safetensors")
        assert weights.keys() == expected.keys()
        for name in expected:  # another processor may add numbers in another order
            torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-5)
        assert load_bundle(directory).metadata["run_id"] == load_bundle(earlier).metadata["run_id"]
        next(directory.glob("checkpoints/step-00000022-*")).unlink()


def test_a_run_goes_on_listed_where_memory_is_larger(make_run: MakeRun, overrides: list[str], tmp_path: Path) -> None:
    choose = [*overrides, "data.pipeline=auto"]
    run_until(make_run(tmp_path / "run", *choose, "data.memory_fraction=1e-9"), 3)
    resumed = make_run(tmp_path / "run", *choose)
    assert resumed.data.pipeline == "workers"
    assert resumed.trainer.resume()
    assert make_run(tmp_path / "other", *choose).data.pipeline == "resident"
