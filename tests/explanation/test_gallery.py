"""The gallery is one file that shows what the arrays hold, works by pointer and keyboard, and runs
no name."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from tests.browser import (
    NASTY_CLASS,
    find_low_contrast,
    find_unnamed,
    find_wide,
    phone,
)
from tests.conftest import SaveModel, change_metadata, save_noise
from vit.bundle import Bundle, load_bundle

NASTY = "<img src=x onerror=alert(1)>.png"
CLASSES = ("cat", "</script><b>dog", NASTY_CLASS)
GRID = 4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Bundle:
    """A model by which each image has all labels."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_model(path, class_names=CLASSES, data={"task": "multilabel"}, img_size=32, patch_size=8)
    point = {"rule": "f1", "thresholds": dict.fromkeys(CLASSES, 0.0)}
    change_metadata(path, {"operating_point": point})
    return load_bundle(path)


def write(folder: Path, bundle: Bundle, names: list[str], **options: object) -> Path:
    files = sorted(map(str, save_noise(folder / "photos", names, size=(40, 60))))
    settings = {"methods": ("rollout", "libra-removal")} | options
    vit.explain(bundle, files, output=folder / "out", formats=("npz", "html"), **settings)
    return folder / "out" / "gallery.html"


@pytest.fixture(scope="module")
def page(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gallery"), bundle, ["a.png", NASTY])


def read_pictures(page: Path, kind: str) -> list[Image.Image]:
    """The pictures of the elements of a class."""
    pattern = rf'class="{kind}"[^>]*?url\(data:image/png;base64,([^)]*)\)'
    found = re.findall(pattern, page.read_text())
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in found]


def test_nothing_in_it_comes_from_outside(page: Path) -> None:
    text = re.sub(r"[A-Za-z0-9+/=]{40,}", "", page.read_text())  # without the pictures
    assert not re.search(r"https?:|//\w|src=[\"'](?!data:)|@import|url\((?!data:)", text)
    assert "default-src 'none'" in text


def test_names_are_shown_as_text(page: Path) -> None:
    text = page.read_text()
    assert NASTY not in text
    assert NASTY_CLASS not in text
    assert "_img src=x onerror=alert(1)_" in text
    assert "</script><b>dog" not in text


def test_a_map_is_one_pixel_for_each_patch_and_each_photo_is_there_once(page: Path) -> None:
    pictures = read_pictures(page, "map")
    assert len(pictures) == 2 * (1 + 3)
    assert all(picture.size == (GRID, GRID) for picture in pictures)
    with np.load(page.with_name("maps.npz")) as arrays:
        rollout = arrays["a.rollout"]
    # files are sorted: the one that begins with < comes first
    opacity = np.asarray(pictures[4])[..., 3].astype(float)
    assert np.array_equal(np.argsort(opacity.ravel())[-3:], np.argsort(rollout.ravel())[-3:])
    assert page.read_text().count("data:image/jpeg") == 2


def test_tiles_are_the_heads_and_the_rows_of_the_rollout(bundle: Bundle, page: Path) -> None:
    photo = Image.open(page.parent.parent / "photos" / "a.png").convert("RGB")
    images = bundle.preprocess([photo])
    with torch.no_grad(), vit.capture_attention(bundle.model) as record:
        bundle.model.forward_features(images)
    flow = vit.attention_rollout(record.attentions)[0, 1:, 1:].reshape(GRID, GRID, GRID, GRID)
    picture = read_pictures(page, "flow")[1]
    assert picture.size == (GRID * GRID, GRID * GRID)
    tiles = np.asarray(picture).reshape(GRID, GRID, GRID, GRID).swapaxes(1, 2) / 255
    expected = (flow / flow.amax(dim=(2, 3), keepdim=True)).numpy()
    assert np.abs(tiles - expected).max() < 1 / 255
    pattern = r'class="heads"[^>]*base64,([^"]*)"'
    encoded = re.findall(pattern, page.read_text())[1]
    heads = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
    assert heads.shape == (2 * GRID, 3 * GRID)
    row = record.attentions[1][0, 2, 0, 1:].reshape(GRID, GRID)
    found = heads[GRID:, 2 * GRID :] / 255
    assert np.abs(found - (row / row.max()).numpy()).max() < 1 / 255


def test_the_first_images_of_very_many_are_shown(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vit.explanation.explain.MAX_IMAGES", 2)
    names = ["a.png", "b.png", "c.png"]
    path = write(tmp_path, bundle, names, methods="rollout", checks=False)
    text = path.read_text()
    assert "The first 2 of 3 images" in text
    assert text.count("<figure") == 2
    # one picture of each map and photo
    assert len(read_pictures(path, "map")) == 2


def open_page(browser, page: Path) -> list:
    browser.get(page.resolve().as_uri())
    return browser.find_elements("tag name", "figure")


def choose(browser, name: str, value: str) -> None:
    script = "const menu = document.getElementById(arguments[0]); menu.value = arguments[1]; "
    script += "menu.dispatchEvent(new Event('change'))"
    browser.execute_script(script, name, value)


def about(card) -> str:
    return card.find_element("tag name", "figcaption").text


@pytest.mark.browser
def test_it_opens_from_disk_and_menus_choose_the_map(browser, page: Path) -> None:
    browser.get_log("browser")
    cards = open_page(browser, page)
    assert len(cards) == 2
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert "rollout (the same for every label)" in about(cards[0])
    assert "with 4 × 4 patches, the test can't tell" in about(cards[0])
    choose(browser, "method", "libra-removal")
    choose(browser, "class", "0")
    assert "evidence for cat (red)" in about(cards[0])
    choose(browser, "class", "1")
    assert "evidence for </script><b>dog (red)" in about(cards[0])
    shown = [map for map in cards[0].find_elements("class name", "map") if map.is_displayed()]
    assert [map.get_attribute("data-target") for map in shown] == ["1"]
    assert browser.find_element("id", "count").text == "2 of 2 photos."
    predicted = cards[0].get_attribute("data-predicted")
    choose(browser, "predicted", predicted)
    for card in cards:
        assert card.is_displayed() == (card.get_attribute("data-predicted") == predicted)
    choose(browser, "predicted", "")
    choose(browser, "sort", "highest")
    order = browser.find_elements("tag name", "figure")
    values = [float(card.get_attribute("data-confidence")) for card in order]
    assert values == sorted(values, reverse=True)


@pytest.mark.browser
def test_a_clicked_patch_shows_what_it_attends_to(browser, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    card, *_ = open_page(browser, page)
    seen = card.find_element("class name", "seen")
    flow = card.find_element("class name", "flow")
    assert not flow.is_displayed()
    # row 3, column 2 of 4 × 4, from the middle of the element
    box = seen.rect
    step = (-0.125 * box["width"], 0.125 * box["height"])
    ActionChains(browser).move_to_element_with_offset(seen, *map(int, step)).click().perform()
    assert flow.is_displayed()
    assert "row 3, column 2" in about(card)
    assert flow.value_of_css_property("background-position").startswith("33.3333% 66.6667%")
    seen.send_keys(Keys.ARROW_RIGHT)
    assert "row 3, column 3" in about(card)
    seen.send_keys(Keys.ARROW_UP)
    assert "row 2, column 3" in about(card)
    seen.send_keys(Keys.ESCAPE)
    assert not flow.is_displayed()
    assert "row 2" not in about(card)


@pytest.mark.browser
def test_text_is_legible_and_a_phone_scrolls_down_only(browser, page: Path) -> None:
    open_page(browser, page)
    for element in browser.find_elements("css selector", "details > summary"):
        element.click()
    assert find_low_contrast(browser) == []
    assert find_unnamed(browser) == []
    with phone(browser):
        open_page(browser, page)
        assert find_wide(browser) == []
