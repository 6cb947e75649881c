"""A training writes down which images it held out, and no later command draws them again."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import TINY_RUN, save_noise
from vit.data.dataset import ImageRule
from vit.data.open import open_dataset, open_for_model
from vit.data.splits import DatasetSplits


def save(root: Path, count: int = 20) -> Path:
    names = [f"{('cat', 'dog')[number % 2]}/{number:02}.png" for number in range(count)]
    save_noise(root, names, size=(8, 8))
    return root


def open_recorded(root: Path, held_out: dict[str, list[str]], **config: object) -> DatasetSplits:
    trained_on = {"name": "folder", "root": str(root), **config}
    recorded = {**trained_on, "held_out": held_out, "num_trained_on": 14}
    return open_for_model(root, recorded=recorded)


def test_written_ids_are_the_splits_whatever_the_rule_would_draw(tmp_path: Path) -> None:
    save(tmp_path)
    drawn = open_dataset("folder", root=tmp_path, rule=ImageRule(split_seed=3))
    held_out = drawn.list_held_out()
    assert set(held_out) == {"test", "validation"}
    again = open_recorded(tmp_path, held_out, split_seed=4, test_fraction=0.5)
    for split in ("train", "validation", "test"):
        assert set(again.split(split).ids) == set(drawn.split(split).ids)
        np.testing.assert_array_equal(again.split(split).labels, drawn.split(split).labels)


def test_new_and_missing_images_change_no_other_image_s_side(tmp_path: Path) -> None:
    save(tmp_path)
    held_out = open_dataset("folder", root=tmp_path).list_held_out()
    gone = held_out["test"][0]
    (tmp_path / gone).unlink()
    Image.new("RGB", (8, 8)).save(tmp_path / "cat" / "new.png")
    test = open_recorded(tmp_path, held_out).split("test")
    assert list(test.ids) == held_out["test"][1:]
    assert "1 of 4 test images of the training are missing" in test.notes
    assert "1 training images are new since the training" in test.notes
    for image in tmp_path.rglob("*.png"):
        image.rename(image.with_name(f"other_{image.name}"))
    with pytest.raises(ValueError, match="none of the 4 test images of the training is among"):
        open_recorded(tmp_path, held_out).split("test")


def test_the_model_of_a_run_holds_the_ids(tmp_path: Path) -> None:
    photos = save(tmp_path / "photos", 40)
    tiny = [text for text in TINY_RUN if not text.startswith(("data.name", "train.epochs"))]
    overrides = [*tiny, "data.name=folder", f"data.root={photos}", "train.max_steps=1"]
    run = vit.train("digits", output=tmp_path / "run", overrides=[*overrides, "train.batch_size=8"])
    drawn = open_dataset("folder", root=photos).list_held_out()
    assert run.bundle.recorded_images["held_out"] == drawn
    assert run.bundle.recorded_images["num_trained_on"] == 40 - sum(map(len, drawn.values()))
