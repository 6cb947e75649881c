"""The gallery is one file that shows what the arrays hold, works by pointer and keyboard, and runs no
name."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit.bundle import Bundle
from vit.data.images import Preprocess
from vit.explanation.explain import collect_explanations
from vit.explanation.items import ImageItem, clean_name
from vit.explanation.methods.table import MapOptions
from vit.explanation.render.explained import Settings
from vit.explanation.render.write import MapWriter
from vit.model.vision_transformer import VisionTransformer
from vit.pages.gallery import Gallery

NASTY = "<img src=x onerror=alert(1)>.png"
CLASSES = ("cat", "</script><b>dog", "bird")


def make_bundle(*, size: int = 32, patch: int = 8, depth: int = 2, heads: int = 3) -> Bundle:
    torch.manual_seed(0)
    sizes = {"img_size": size, "patch_size": patch, "depth": depth, "num_heads": heads}
    model = VisionTransformer(num_classes=3, embed_dim=24, **sizes).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return Bundle(model, Preprocess(image_size=(size, size)), CLASSES, name="small", sha256="0" * 64)


def make_items(names: list[str], *, size: tuple[int, int] = (60, 40)) -> list[ImageItem]:
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8) for _ in names]
    return [
        ImageItem(name, f"image-{number}", lambda p=picture: (Image.fromarray(p), "0" * 64))
        for number, (name, picture) in enumerate(zip(names, pictures, strict=True))
    ]


def write_gallery(
    folder: Path, bundle: Bundle, items: list[ImageItem], **settings: object
) -> tuple[Path, dict, dict[str, np.ndarray]]:
    gallery = Gallery(bundle.class_names)
    choices = {"methods": ("rollout", "gae", "cdam"), "target": "top3", "sanity_checks": True} | settings
    with MapWriter(folder, bundle, Settings(**choices), formats=("npz",)) as writer:
        collect_explanations(
            bundle,
            items,
            Settings(**choices),
            observers=[writer.add, gallery.add],
            patch_attention_bytes=gallery.patch_attention_bytes,
        )
    gallery.write(folder / "gallery.html", title="Maps & <b>more</b>")
    text = (folder / "gallery.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    return folder / "gallery.html", data, writer.arrays


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("gallery")
    return write_gallery(folder, make_bundle(), make_items(["a.png", NASTY]))


def decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=np.uint8)


def test_nothing_in_it_comes_from_outside(page: tuple) -> None:
    text = re.sub(r"[A-Za-z0-9+/=]{40,}", "", page[0].read_text())  # without the encoded arrays
    assert not re.search(r"https?:|//\w|src=[\"'](?!data:)|@import|url\(", text)
    assert "default-src 'none'" in text


def test_names_are_shown_as_text(page: tuple) -> None:
    text = page[0].read_text()
    assert NASTY not in text
    assert "&lt;img src=x onerror=alert(1)&gt;.png" in text
    assert "Maps &amp; &lt;b&gt;more&lt;/b&gt;" in text
    assert "</script><b>dog" not in text


def test_values_equal_the_arrays_to_eight_bits(page: tuple) -> None:
    _, data, arrays = page
    checked = 0
    for number, image in enumerate(data["images"]):
        for found in image["maps"]:
            cells = decode(found["values"])
            name = f"image-{number}.{found['method']}"
            if found["target"]:
                name += f".{clean_name(found['target']['name'])}"
            restored = found["low"] + cells / 255 * (found["high"] - found["low"])
            exact = arrays[name].ravel()
            assert np.abs(restored - exact).max() <= (found["high"] - found["low"]) / 500
            checked += 1
    assert checked == 2 * (1 + 3 + 3)


def test_sixteen_images_of_a_base_size_model_stay_below_five_megabytes(tmp_path: Path) -> None:
    bundle = make_bundle(size=224, patch=16, depth=12, heads=12)
    items = make_items([f"{number}.jpg" for number in range(16)], size=(640, 480))  # noise: the worst photo
    path, data, _ = write_gallery(tmp_path, bundle, items, sanity_checks=False, methods=("rollout", "gae"))
    assert len(data["images"]) == 16
    assert path.stat().st_size <= 5_000_000
    matrices = [(each["layer"], each["head"]) for each in data["images"][0]["patch_attention"]]
    assert matrices == [(None, None), *((layer, None) for layer in range(12))]


def test_more_images_than_a_page_bears_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vit.pages.gallery.MOST_IMAGES", 3)
    path, data, _ = write_gallery(tmp_path, make_bundle(), make_items(list("abcde")), sanity_checks=False)
    assert len(data["images"]) == 3
    assert "3 of 5 images" in path.read_text()


def test_a_sheet_of_heads_leaves_the_page_whole(tmp_path: Path) -> None:
    options = MapOptions(layer=None, head=None)
    _, data, _ = write_gallery(
        tmp_path, make_bundle(), make_items(["a"]), sanity_checks=False, methods=("raw", "rollout"), options=options
    )
    assert [found["method"] for found in data["images"][0]["maps"]] == ["rollout"]


# --- in the browser -----------------------------------------------------------------------------------------

PIXELS = "const [c] = arguments; return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"


def open_page(browser, path: Path):
    browser.get(path.as_uri())
    browser.execute_async_script(
        "const done = arguments[0]; Promise.all(cards.map(card => card.photo.decode())).then(() => done())"
    )
    return browser.find_elements("tag name", "canvas")


def choose(browser, name: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element("id", name)).select_by_visible_text(value)


def set_opacity(browser, percent: int) -> None:
    script = "const [s, v] = arguments; s.value = v; s.dispatchEvent(new Event('input'))"
    browser.execute_script(script, browser.find_element("id", "opacity"), percent)


def about(browser, image: int = 0) -> str:
    return browser.find_elements("class name", "about")[image].text


@pytest.mark.browser
def test_it_opens_from_disk_without_errors_or_alerts(browser, page: tuple) -> None:
    canvases = open_page(browser, page[0])
    assert len(canvases) == 2
    assert browser.title == "Maps & <b>more</b>"
    assert browser.find_elements("tag name", "strong")[1].text == NASTY
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert about(browser) == "attention rollout, does not depend on the class"


@pytest.mark.browser
def test_selectors_change_the_map_and_what_is_said_of_it(browser, page: tuple) -> None:
    (first, _) = open_page(browser, page[0])
    rollout = browser.execute_script(PIXELS, first)
    choose(browser, "method", "cdam")
    choose(browser, "class", "</script><b>dog")
    assert about(browser).startswith("class-discriminative attention map, for </script><b>dog ")
    dog = browser.execute_script(PIXELS, first)
    choose(browser, "class", "bird")
    assert browser.execute_script(PIXELS, first) != dog != rollout
    facts = browser.find_elements("class name", "facts")[0].text
    assert "correlation with the effect of the patches" in facts
    assert "in prefix tokens" in facts


@pytest.mark.browser
def test_opacity_zero_shows_the_photo(browser, page: tuple) -> None:
    (first, _) = open_page(browser, page[0])
    set_opacity(browser, 0)
    clear = browser.execute_script(PIXELS, first)
    set_opacity(browser, 100)
    full = browser.execute_script(PIXELS, first)
    photo = browser.execute_script(
        "const [shown] = arguments, c = document.createElement('canvas'); c.width = shown.width;"
        "c.height = shown.height;"
        "c.getContext('2d').drawImage(cards[0].photo, 0, 0, c.width, c.height);"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]",
        first,
    )
    width, height = first.get_property("width"), first.get_property("height")
    shown, expected = (np.array(p).reshape(height, width, 4) for p in (clear, photo))
    inside = slice(width // 2 - 50, width // 2 + 50)
    assert np.array_equal(shown[:, inside], expected[:, inside])
    assert clear != full


@pytest.mark.browser
def test_full_opacity_draws_the_same_colours_as_the_pictures(browser, page: tuple) -> None:
    from vit.explanation.render.overlay import colour, place_map

    (first, _) = open_page(browser, page[0])
    set_opacity(browser, 100)
    width, height = first.get_property("width"), first.get_property("height")
    shown = np.array(browser.execute_script(PIXELS, first)).reshape(height, width, 4)[..., :3]
    values = page[2]["image-0.rollout"]
    placed, coverage = place_map(
        values, Preprocess(image_size=(32, 32)).geometry((60, 40)), size=(width, height), smooth=True
    )
    expected = colour(placed, low=float(values.min()), high=float(values.max()), signed=False)
    assert np.abs(shown.astype(int) - expected)[coverage > 0].max() <= 6  # two roundings to 256 colours


@pytest.mark.browser
def test_pointing_at_a_patch_shows_its_attention(browser, page: tuple) -> None:
    from selenium.webdriver import ActionChains

    (first, _) = open_page(browser, page[0])
    before = browser.execute_script(PIXELS, first)
    ActionChains(browser).move_to_element_with_offset(first, 3, 3).perform()  # just right of and below the middle
    assert about(browser) == "what patch (row 2, column 2) attends to: rollout"
    row = browser.execute_script("return [...cards[0].view().cells]")
    rollout = page[1]["images"][0]["patch_attention"][0]
    expected = decode(rollout["values"]).reshape(16, 16)
    assert row == expected[2 * 4 + 2].tolist()
    assert browser.execute_script(PIXELS, first) != before
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert about(browser) == "attention rollout, does not depend on the class"
    assert browser.execute_script(PIXELS, first) == before


@pytest.mark.browser
def test_layers_and_heads_can_be_asked(browser, page: tuple) -> None:
    from selenium.webdriver import ActionChains

    (first, _) = open_page(browser, page[0])
    choose(browser, "method", "attention of a layer")
    choose(browser, "layer", "1")
    choose(browser, "head", "2")
    assert about(browser) == "what the patches attend to on average: layer 1 head 2"
    ActionChains(browser).move_to_element_with_offset(first, 3, 3).perform()
    assert about(browser) == "what patch (row 2, column 2) attends to: layer 1 head 2"


@pytest.mark.browser
def test_everything_can_be_done_by_keyboard(browser, page: tuple) -> None:
    from selenium.webdriver import ActionChains, Keys

    open_page(browser, page[0])

    def press(*keys: str) -> None:
        ActionChains(browser).send_keys(*keys).perform()

    seen = []
    for _ in range(8):
        press(Keys.TAB)
        focused = browser.switch_to.active_element
        seen.append(focused.get_attribute("id") or focused.tag_name)
        if focused.tag_name == "canvas":
            break
    assert seen[-3:] == ["method", "opacity", "canvas"]  # selectors with a single choice are passed over
    press(Keys.ARROW_RIGHT)
    assert about(browser) == "what patch (row 2, column 2) attends to: rollout"
    press(Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert about(browser) == "what patch (row 1, column 0) attends to: rollout"
    press(Keys.ESCAPE)
    assert about(browser) == "attention rollout, does not depend on the class"


@pytest.mark.browser
def test_light_and_dark_follow_the_system(browser, page: tuple) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        open_page(browser, page[0])
        colours[scheme] = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert colours == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}
