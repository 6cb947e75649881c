"""Which images are meant, and which class of the model a class of theirs is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vit.bundle import Bundle
from vit.data.cache import decode_dataset
from vit.data.dataset import printable
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.evaluation.images import EvaluationSet, find_overlap, load_images, match_classes


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


def test_classes_follow_their_names_when_the_orders_differ() -> None:
    matched = match_classes(
        np.array([0, 1, 2, 2]),
        source_classes=("cat", "dog", "emu"),
        model_classes=("emu", "cat", "dog"),
    )
    assert matched.tolist() == [1, 2, 0]


def test_a_model_may_know_more_classes_and_unused_names_do_not_matter() -> None:
    matched = match_classes(
        np.array([1]), source_classes=("unknown", "dog"), model_classes=("cat", "dog", "emu")
    )
    assert matched.tolist() == [-1, 1]


def test_a_class_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the model doesn't know 'yak' of this data; it knows 'cat', 'dog'"
    ):
        match_classes(np.array([0, 1]), source_classes=("cat", "yak"), model_classes=("cat", "dog"))


def test_the_first_of_timms_synonyms_is_enough_unless_two_classes_share_it() -> None:
    model = ("tench, Tinca tinca", "crane", "crane, machine")
    assert match_classes(
        np.array([0, 1]), source_classes=("tench", "crane"), model_classes=model
    ).tolist() == [0, 1]
    with pytest.raises(ValueError, match="doesn't know 'drake'"):
        match_classes(
            np.array([0]),
            source_classes=("drake",),
            model_classes=("drake, bird", "drake, musician", "x"),
        )


def test_a_planted_training_image_is_found(
    bundle: Bundle, images: EvaluationSet, tmp_path: Path
) -> None:
    root = write_images(tmp_path / "set", "1", "2")
    training = decode_dataset(
        open_dataset("folder", root=root).split("all"), size=None, progress=False
    )
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


def test_names_of_any_bytes_become_text() -> None:
    assert printable("caf\udce9.png") == "caf�.png"
    assert printable("naïve.png") == "naïve.png"
