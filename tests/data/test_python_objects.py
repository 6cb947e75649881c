"""Images from Python get the labels that they were passed with, or one sentence says why not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vit.data.dataset import ImageRule
from vit.data.images import convert_pixels
from vit.data.open import open_passed
from vit.data.sources.python_objects import find_python_objects

COUNT = 12
LEVELS = np.arange(COUNT, dtype=np.uint8) * 20
PIXELS = np.broadcast_to(LEVELS[:, None, None, None], (COUNT, 6, 5, 3)).copy()
NAMES = [("red", "green", "blue")[number % 3] for number in range(COUNT)]
NUMBERS = [number % 3 for number in range(COUNT)]


class Items:
    """A map-style set of torch."""

    classes = ("red", "green", "blue")

    def __init__(self, convert: Callable[[np.ndarray], Any]) -> None:
        self.convert = convert

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if index >= COUNT:
            raise IndexError
        return self.convert(PIXELS[index]), NUMBERS[index]


FORMS: dict[str, Any] = {
    "arrays": (PIXELS, NAMES),
    "tensors": (torch.from_numpy(PIXELS).permute(0, 3, 1, 2) / 255, NAMES),
    "a list of pairs": list(zip(map(Image.fromarray, PIXELS), NAMES, strict=True)),
    "dictionaries": [
        {"image": image, "label": name} for image, name in zip(PIXELS, NAMES, strict=True)
    ],
    "a set with names": Items(Image.fromarray),
    "a set of arrays": Items(np.asarray),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_keeps_images_and_labels_together(form: str) -> None:
    images = open_passed(FORMS[form], rule=ImageRule()).split("all")
    assert [images.class_names[label] for label in images.labels] == NAMES
    assert [images.image(index).getpixel((0, 0))[0] for index in range(COUNT)] == LEVELS.tolist()
    chosen = images.subset([5, 2])
    assert chosen.image(0).getpixel((0, 0))[0] == LEVELS[5]


def test_parts_are_splits_with_the_same_classes() -> None:
    first, second = (PIXELS[:9], NAMES[:9]), (PIXELS[9:], NAMES[9:])
    source = open_passed({"train": first, "val": second}, rule=ImageRule())
    assert source.own_splits == ["train", "validation"]
    assert source.split("validation").class_names == source.split("train").class_names
    assert source.split("validation").ids[0] == "validation/000000"
    with pytest.raises(ValueError, match=r'validation images as \{"train"'):
        find_python_objects(([*zip(*first, strict=True)], [*zip(*second, strict=True)]), None)
    with pytest.raises(ValueError, match="name its sets train, validation"):
        find_python_objects({"x": first}, None)


def test_several_labels_an_image() -> None:
    names = ("red", "green", "blue")
    labels = [["red", "blue"], ["green"], [], ["blue"]] * 3
    images = open_passed((PIXELS, labels), names, rule=ImageRule()).split("all")
    marks = [[True, False, True], [False, True, False], [False] * 3, [False, False, True]] * 3
    assert images.labels.tolist() == marks


@pytest.mark.parametrize(
    ("dataset", "task", "sentence"),
    [
        ((PIXELS, NAMES[:5]), None, "12 images and 5 labels"),
        ((PIXELS, [0.5] * COUNT), None, "are 0.5, not class names"),
        ((PIXELS, [1, 2] * 6), None, "are 1, 2, not .* integers that count"),
        ((PIXELS, NAMES), "multilabel", "for several labels"),
        ((PIXELS, NUMBERS), "multilabel", "are 0, 1, 2, not .* for several labels"),
        # marks, or numbers of classes?
        ((PIXELS, np.eye(3, dtype=int)[NUMBERS]), None, "for several labels lists of their names"),
        ([("a.png", "red")], None, "item 0 of dataset is a str, not an image"),
        (iter([]), None, "pass list"),
    ],
)
def test_what_is_no_data_set_is_refused(dataset: Any, task: str | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        find_python_objects(dataset, None, task=task)


def test_pixels_of_any_kind_are_the_same() -> None:
    image = PIXELS[3]
    for kind in (np.float16, np.float32, np.float64):
        assert (convert_pixels(image.astype(kind) / kind(255)) == image).all()
    assert (convert_pixels(torch.from_numpy(image).permute(2, 0, 1)) == image).all()
    with pytest.raises(ValueError, match="without Normalize"):
        convert_pixels(torch.full((3, 4, 5), -2.0))
    with pytest.raises(ValueError, match="not pixels"):
        convert_pixels(np.zeros((3, 5, 3), dtype=np.uint8))
