"""Which images are meant, and which class of the model a class of theirs is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit.bundle import Bundle
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.data.sources.base import ArrayReader
from vit.evaluation.images import EvaluationSet, find_labels, find_overlap, load_images


def write_images(root: Path, *folders: str, count: int = 3) -> Path:
    rng = np.random.default_rng(0)
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for number in range(count):
            coarse = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((40, 40), Image.Resampling.BICUBIC).save(
                root / folder / f"{number}.png"
            )
    return root


def match(occurring: list[Any], source: tuple[str, ...], model: tuple[str, ...]) -> list[Any]:
    """Classes of the model for images of these classes of a data set."""
    labels = np.array(occurring)
    reader = ArrayReader(np.zeros((len(labels), 1, 1, 3), np.uint8))
    ids = tuple(map(str, range(len(labels))))
    dataset = ImageDataset(
        name="made up", split="test", class_names=source, labels=labels, ids=ids, reader=reader
    )
    return list(find_labels(dataset, model).tolist())


def test_classes_follow_their_names() -> None:
    # the orders differ
    assert match([0, 1, 2, 2], ("cat", "dog", "emu"), ("emu", "cat", "dog")) == [1, 2, 0, 0]
    # the model knows more classes, and a name that doesn't occur is unknown
    assert match([1], ("unknown", "dog"), ("cat", "dog", "emu")) == [1]
    marks = [[True, False], [False, False]]
    assert match(marks, ("dog", "unknown"), ("dog", "emu")) == marks
    # the first of timm's synonyms is enough
    timm = ("tench, Tinca tinca", "crane", "crane, machine")
    assert match([0, 1], ("tench", "crane"), timm) == [0, 1]


def test_classes_that_the_model_does_not_know_are_refused() -> None:
    known = "the model doesn't know 'yak' of this data; it knows 'cat', 'dog'"
    with pytest.raises(ValueError, match=known):
        match([0, 1], ("cat", "yak"), ("cat", "dog"))
    # two classes share the first synonym
    with pytest.raises(ValueError, match="doesn't know 'drake'"):
        match([0], ("drake",), ("drake, bird", "drake, musician", "x"))


def test_a_planted_training_image_is_found(
    bundle: Bundle, images: EvaluationSet, tmp_path: Path
) -> None:
    root = write_images(tmp_path / "set", "1", "2")
    training = decode_dataset(open_dataset("folder", root=root).split("all"), Preprocess((8, 8)))
    held = write_images(tmp_path / "test", "1", "2", count=1)
    Image.open(root / "1" / "0.png").save(held / "2" / "copy.png")
    Image.open(root / "2" / "1.png").convert("RGB").save(held / "1" / "recoded.jpg", quality=80)
    fresh = np.random.default_rng(9).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    for name in ("1", "2"):
        Image.fromarray(np.rot90(fresh, int(name)).copy()).resize((40, 40)).save(
            held / name / "0.png"
        )
    tested = load_images(
        replace(bundle, preprocess=Preprocess((32, 32))), open_dataset("folder", root=held), "all"
    )
    is_correct = np.arange(len(tested)) % 2 == 0
    trained = replace(bundle, training_hashes=tuple(training.hashes))
    found = find_overlap(trained, tested, is_correct=is_correct)
    assert found is not None
    assert (found.exact, found.near) == (1, 1)
    assert found.examples == ["2/copy.png", "1/recoded.jpg"]
    assert bundle.training_hashes is not None
    other = find_overlap(bundle, images, is_correct=np.ones(len(images), dtype=bool))
    assert other is not None
    assert other.exact == 0
    # a training that decoded its images batch by batch has no hashes: nothing is decoded to look
    unknown = replace(bundle, training_hashes=None)
    assert find_overlap(unknown, images, is_correct=np.ones(len(images), dtype=bool)) is None
