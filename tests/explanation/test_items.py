"""Names of files: recognisable, unlike each other, safe."""

from pathlib import Path

import pytest
from PIL import Image

from vit.data.open import open_dataset
from vit.explanation.items import items_from_dataset, name_images
from vit.runtime.files import clean_name


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["photos/tabby.jpg", "photos/zebra.png"], ["tabby", "zebra"]),
        (["d/cat/1.jpg", "d/dog/1.jpg", "d/dog/2.jpg"], ["cat-1", "dog-1", "dog-2"]),
    ],
)
def test_a_file_is_named_by_its_stem_and_the_folders_that_not_all_have(
    paths: list[str], names: list[str]
) -> None:
    assert name_images(paths) == names


def test_files_that_differ_in_their_suffix_or_case_have_names_of_their_own(tmp_path: Path) -> None:
    assert len({name.casefold() for name in name_images(["a/x.jpg", "a/x.png", "a/X.webp"])}) == 3
    places = ("tench/1.jpg", "tench/1.png", "tench/2.jpg", "church/1.jpg", "church/a-1.jpg")
    for number, place in enumerate((*places, "church/a/1.jpg")):
        (tmp_path / "photos" / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 48), (40 * number, 0, 90)).save(tmp_path / "photos" / place)
    dataset = open_dataset("folder", root=tmp_path / "photos").split("all")
    items = items_from_dataset(dataset, num_images=6)
    assert len({item.name.casefold() for item in items}) == len(items) == 6
    assert {"tench-2", "church-1"} <= {item.name for item in items}
    # evenly chosen
    few = [item.path for item in items_from_dataset(dataset, num_images=3)]
    assert few == [dataset.ids[index] for index in (0, 2, 5)]


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("<img src=x onerror=alert(1)>", "_img src=x onerror=alert(1)_"),
        ("-rf", "rf"),
        ("a/b\\c:d", "a_b_c_d"),
        ("..", "image"),
        ("Zürich 雪", "Zürich 雪"),
        ("tab\tnew\nline", "tab_new_line"),
        ("x" * 300, "x" * 120),
        ("bad\udcff", "bad_"),
    ],
)
def test_what_file_systems_trip_over_is_replaced(name: str, clean: str) -> None:
    assert clean_name(name) == clean
