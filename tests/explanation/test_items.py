"""Names of files: recognisable, unlike each other, safe."""

import hashlib
from pathlib import Path

import pytest
import torch
from PIL import Image

import vit
from tests.explanation.model_zoo import build
from vit.api import explain
from vit.bundle import Bundle
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.explanation.items import items_from_dataset, items_from_images, name_images
from vit.explanation.targets import build_target
from vit.runtime.files import clean_name


def test_a_stem_is_the_name_where_it_is_the_only_one() -> None:
    assert name_images(["photos/tabby.jpg", "photos/zebra.png"]) == ["tabby", "zebra"]


def test_equal_stems_are_told_apart_by_their_folders() -> None:
    assert name_images(["d/cat/1.jpg", "d/dog/1.jpg", "d/dog/2.jpg"]) == ["cat-1", "dog-1", "dog-2"]


def test_names_that_collide_all_the_same_get_a_hash() -> None:
    names = name_images(["a/x.jpg", "a/x.png", "a/X.webp"])
    assert len({name.casefold() for name in names}) == 3
    assert name_images(["a/x.jpg", "a/x.png"]) == name_images(["a/x.jpg", "a/x.png"])


def test_files_of_a_data_set_that_differ_in_their_suffix_have_maps_of_their_own(
    tmp_path: Path,
) -> None:
    places = ("tench/1.jpg", "tench/1.png", "tench/2.jpg", "church/1.jpg", "church/a-1.jpg")
    for number, place in enumerate((*places, "church/a/1.jpg")):
        (tmp_path / "photos" / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 48), (40 * number, 0, 90)).save(tmp_path / "photos" / place)
    dataset = open_dataset("folder", root=tmp_path / "photos").split("all")
    items = items_from_dataset(dataset, num_images=6)
    assert len({item.name.casefold() for item in items}) == len(items) == 6
    assert {"tench-2", "church-1"} <= {item.name for item in items}


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


def test_files_are_read_with_their_hash_in_the_order_given(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("b.png", "a.png")]
    for path in paths:
        Image.new("RGB", (4, 4)).save(path)
    items = items_from_images(paths)
    assert [item.name for item in items] == ["b", "a"]
    image, sha256 = items[0].read()
    assert image.size == (4, 4)
    assert sha256 == hashlib.sha256((tmp_path / "b.png").read_bytes()).hexdigest()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"\xff\xd8\xff\xe0 no image")
    with pytest.raises(ValueError, match=r"broken\.jpg"):
        items_from_images([str(path)])[0].read()


def test_images_of_a_data_set_are_named_by_their_ids() -> None:
    items = items_from_dataset(open_dataset("digits").split("test"), num_images=3)
    assert len(items) == 3
    assert all(item.name.startswith("digits-") for item in items)
    assert items[0].read()[0].mode == "RGB"


def test_a_class_is_found_by_one_of_its_synonyms() -> None:
    names = [
        "great white shark, white shark",
        "crane, bird",
        "crane",
        "Cat",
        "drake, crane machine",
    ]
    logits = torch.zeros(2, 5)
    for target, expected in [
        ("great white shark", 0),
        ("White Shark", 0),
        ("cat", 3),
        ("crane", 2),
        ("2", 2),
    ]:
        assert build_target(target, names).choose(logits).tolist() == [[expected]] * 2
    with pytest.raises(ValueError, match=r"class 'CRANE' is not unique: 1 .* 2 .*; give the index"):
        build_target("CRANE", names)
    with pytest.raises(ValueError, match="unknown class 'shark'"):
        build_target("shark", names)


def test_images_of_any_kind_are_explained_and_each_class_has_its_numbers(tmp_path: Path) -> None:
    model, _ = build("ours")
    bundle = Bundle.from_model(model, class_names=list("abcde"), preprocess=Preprocess((32, 48)))
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    images = [Image.new(mode, (50, 40)) for mode in ("L", "RGBA", "P", "CMYK", "1")]
    paths = [tmp_path / "red.png", str(tmp_path)]
    found = explain(bundle, [*images, *paths], methods="gae", target="top3")
    assert found.maps["gae"].shape == (7, 3, 4, 6)
    assert found.targets.shape == (7, 3)
    for image in found.images:
        assert [result.target for result in image.maps] == list(image.targets)
    assert bundle.preprocess(images).shape == (5, 3, 32, 48)

    # the shorter function has the same maps, of one method and without checks
    same = vit.explain(
        bundle, [*images, *paths], methods="gae", target="top3", batch_size=7, checks=False
    )
    torch.testing.assert_close(same.maps["gae"], found.maps["gae"])
    assert same.checks == {"gae": [[]] * 7}
    with pytest.raises(ValueError, match="no images"):
        vit.explain(bundle, [])
