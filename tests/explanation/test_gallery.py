"""The gallery is one file that shows what the arrays hold, works by pointer and keyboard, and runs
no name."""

import base64
import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import binary_dilation

import vit
from tests.browser import (
    NASTY_CLASS,
    NASTY_FILE,
    find_low_contrast,
    find_unnamed,
    find_wide,
    phone,
)
from tests.explanation.collector import build_writer, explain_with
from vit.bundle import Bundle
from vit.data.duplicates import hash_pixels
from vit.data.preprocess import Preprocess
from vit.explanation.capture.forward import run_forward
from vit.explanation.gallery.gallery import Gallery, _fit_pictures
from vit.explanation.heads import measure_heads
from vit.explanation.items import ImageItem, items_from_images
from vit.explanation.records import ImageResult
from vit.explanation.render.scale import relative_to_uniform
from vit.explanation.training_photos import Neighbour
from vit.model.model_file import Likeness
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import clean_name

NASTY = "<img src=x onerror=alert(1)>.png"
CLASSES = ("cat", "</script><b>dog", "bird")


def make_bundle(*, size: int = 32, patch: int = 8, depth: int = 2, heads: int = 3) -> Bundle:
    torch.manual_seed(0)
    sizes = {"img_size": size, "patch_size": patch, "depth": depth, "num_heads": heads}
    model = VisionTransformer(num_classes=3, embed_dim=24, **sizes).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return Bundle(
        model, Preprocess(image_size=(size, size)), CLASSES, name="small", sha256="0" * 64
    )


def make_items(names: list[str], *, size: tuple[int, int] = (60, 40)) -> list[ImageItem]:
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8) for _ in names]
    return [
        ImageItem(
            name, clean_name(Path(name).stem), lambda p=picture: (Image.fromarray(p), "0" * 64)
        )
        for number, (name, picture) in enumerate(zip(names, pictures, strict=True))
    ]


def write_gallery(
    folder: Path, bundle: Bundle, items: list[ImageItem], **settings: object
) -> tuple[Path, dict, dict[str, np.ndarray]]:
    gallery = Gallery(bundle, num_images=len(items))
    choices = {
        "methods": ("rollout", "gae", "cdam"),
        "target": "top3",
        "sanity_checks": True,
    } | settings
    with build_writer(folder, bundle, choices, formats=("npz",)) as writer:
        explain_with(
            bundle,
            items,
            choices,
            writer.add,
            gallery.add,
            token_bytes=gallery.token_bytes,
        )
    gallery.write(folder / "gallery.html", title="Maps & <b>more</b>")
    return folder / "gallery.html", read_data(folder / "gallery.html"), writer.arrays


def read_data(page: Path) -> dict:
    """What the page's script reads, with the text of each image."""
    text = page.read_text()
    data = json.loads(
        re.search(r'<script type="application/json" id="page">(.*?)</script>', text, re.S)[1]
    )
    images = re.findall(r'<script type="application/json" class="image">(.*?)</script>', text, re.S)
    return data | {
        "images": [
            of_all | json.loads(one) for of_all, one in zip(data["images"], images, strict=True)
        ]
    }


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


def test_names_are_shown_as_text(page: tuple, tmp_path: Path) -> None:
    (item,) = make_items([NASTY])
    named = replace(item, name=clean_name(Path(NASTY).stem))
    titled, _, _ = write_gallery(tmp_path, make_bundle(), [named], sanity_checks=False)
    text = page[0].read_text() + titled.read_text()
    assert NASTY not in text
    assert "&lt;img src=x onerror=alert(1)&gt;.png" in text
    assert "Maps &amp; &lt;b&gt;more&lt;/b&gt;" in text
    assert "</script><b>dog" not in text


def test_values_equal_the_arrays_to_eight_bits(page: tuple) -> None:
    _, data, arrays = page
    checked = 0
    for image in data["images"]:
        for found in image["maps"]:
            cells = decode(found["values"])
            name = f"{clean_name(Path(image['title']).stem)}.{found['method']}"
            if found["target"]:
                name += f".{clean_name(found['target']['name'])}"
            restored = found["low"] + cells / 255 * (found["high"] - found["low"])
            exact = relative_to_uniform(arrays[name]).ravel()
            assert np.abs(restored - exact).max() <= (found["high"] - found["low"]) / 500
            checked += 1
    assert checked == 2 * (1 + 3 + 3)


@pytest.mark.extended
def test_sixteen_images_of_a_base_size_model_stay_below_five_megabytes(tmp_path: Path) -> None:
    # noise: the worst photo
    items = make_items([f"{number}.jpg" for number in range(16)], size=(640, 480))
    bundle = make_bundle(size=224, patch=16, depth=12, heads=12)
    names = [(f"{class_name}/{number}.png", 0) for class_name in "ab" for number in range(8)]
    for (name, _), item in zip(names, items, strict=True):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        item.read()[0].save(path)
    photos = [item.read()[0] for item in items]
    digests = np.array([hash_pixels(photo) for photo in photos], dtype=np.uint64)
    features = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float16)
    bundle = replace(
        bundle,
        config={"data": {"name": "folder", "root": str(tmp_path / "photos")}},
        metadata={"conformal": {"thresholds": {}, "training_images": names}},
        likeness=Likeness(features, np.ones(1, np.float32)),
        training_hashes=(digests, np.zeros_like(digests)),
    )
    path, data, _ = write_gallery(
        tmp_path, bundle, items, sanity_checks=False, methods=("rollout", "gae")
    )
    assert len(data["images"]) == 16
    assert path.stat().st_size <= 5_000_000
    assert all(len(image["neighbours"]) == 4 for image in data["images"])
    assert data["images"][0]["neighbours"][0]["picture"] is not None
    matrices = [(each["layer"], each["head"]) for each in data["images"][0]["tokens"]["attention"]]
    assert matrices == [(None, None)]  # those of the layers would be 6.7 MB


@pytest.mark.extended
def test_of_few_images_more_of_the_tokens_is_shown(tmp_path: Path) -> None:
    bundle = make_bundle(size=64, patch=4, depth=4)

    def list_kinds(count: int) -> set[str]:
        items = make_items([str(number) for number in range(count)])
        folder = tmp_path / str(count)
        _, data, _ = write_gallery(folder, bundle, items, sanity_checks=False)
        kinds = set()
        for each in data["images"][0]["tokens"]["attention"]:
            assert len(decode(each["values"])) == 257**2  # at the grid of the patches or not at all
            kinds.add(
                "rollout" if each["layer"] is None else "layer" if each["head"] is None else "head"
            )
        return kinds

    assert list_kinds(1) == {"rollout", "layer", "head"}
    assert list_kinds(6) == {"rollout", "layer"}
    assert list_kinds(20) == {"rollout"}


def test_the_first_images_of_very_many_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vit.explanation.gallery.gallery.MAX_IMAGES", 4)
    path, data, arrays = write_gallery(
        tmp_path, make_bundle(), make_items(list("abcdefgh")), sanity_checks=False
    )
    assert [image["title"] for image in data["images"]] == list("abcd")
    assert "The first 4 of 8 images" in path.read_text()
    assert len(arrays) == 8 * (1 + 3 + 3)


def test_the_effects_of_heads_are_those_of_the_first_class(page: tuple) -> None:
    bundle = make_bundle()
    (item, _) = make_items(["a.png", NASTY])
    measured = measure_heads(bundle, item.read()[0])
    found = np.array(page[1]["images"][0]["tokens"]["effects"])
    assert found.shape == (2, 3)
    np.testing.assert_allclose(found, measured.effects[0], rtol=6e-3)


def write_named_gallery(folder: Path, bundle: Bundle) -> tuple[Path, dict]:
    """Of two photos that the model file names, and one that it doesn't."""
    root = Path(bundle.config["data"]["root"])
    named = bundle.metadata["conformal"]["training_images"]
    paths = [root / named[0][0], root / named[-1][0], root / "ant" / "unnamed.png"]
    items = items_from_images(map(str, paths))
    path, data, _ = write_gallery(folder, bundle, items, sanity_checks=False, target="auto")
    return path, data


def test_each_image_has_the_nearest_training_photos_of_predict(
    named_bundle: Bundle, tmp_path: Path
) -> None:
    path, data = write_named_gallery(tmp_path, named_bundle)
    root = Path(named_bundle.config["data"]["root"])
    named = named_bundle.metadata["conformal"]["training_images"]
    predicted = vit.predict(
        named_bundle, [root / named[0][0], root / named[-1][0]], similar=4
    ).predictions
    for image, expected in zip(data["images"], predicted, strict=False):
        assert [(row["path"], row["class_name"]) for row in image["neighbours"]] == [
            (row.path, row.class_name) for row in expected.similar or []
        ]
        for row, other in zip(image["neighbours"], expected.similar or [], strict=True):
            assert row["similarity"] == pytest.approx(other.similarity, abs=1e-5)
            assert row["picture"].startswith("data:image/jpeg;base64,")
    text = path.read_text()
    assert NASTY_FILE not in text
    assert NASTY_CLASS not in text

    # the page shows fewer of the tokens instead
    plain = replace(named_bundle, likeness=None, metadata={})
    with_neighbours = Gallery(named_bundle, num_images=1).token_bytes
    assert with_neighbours == Gallery(plain, num_images=1).token_bytes - 12_000
    neighbour = Neighbour("a.png", "ant", 1.0, "x" * 7_000)
    pictures = [row.picture is not None for row in _fit_pictures([neighbour] * 4)]
    assert pictures == [True, True, False, False]


# --- in the browser
# -----------------------------------------------------------------------------------------

PIXELS = "const [c] = arguments; return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
PHOTO = """const [shown] = arguments, c = document.createElement('canvas');
c.width = shown.width; c.height = shown.height;
c.getContext('2d').drawImage(document.querySelector('figure').card.photo, 0, 0, c.width, c.height);
return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"""
CARDS = "const cards = [...document.querySelectorAll('figure')].map(figure => figure.card); "


def open_page(browser, path: Path):
    """The canvases of the maps, drawn."""
    browser.get(path.as_uri())
    drawn = "Promise.all(cards.map(card => card.photo.decode())).then(() => requestAnimationFrame(() => done()))"
    browser.execute_async_script(CARDS + "const done = arguments[0]; " + drawn)
    return browser.find_elements("css selector", "canvas.map")


def choose(browser, name: str, value: str) -> None:
    from selenium.webdriver.support.ui import Select

    browser.execute_script("document.querySelector('.more').open = true")
    Select(browser.find_element("id", name)).select_by_visible_text(value)


def set_opacity(browser, percent: int) -> None:
    script = "const [s, v] = arguments; s.value = v; s.dispatchEvent(new Event('input'))"
    browser.execute_script(script, browser.find_element("id", "opacity"), percent)


def read(browser, name: str, image: int = 0) -> str:
    return browser.find_elements("class name", name)[image].text


def find_most(browser) -> str:
    """Where the first card's map is highest: below "Numbers", and for screen readers."""
    spoken, shown = browser.find_elements("css selector", "figure:first-of-type .most")
    assert spoken.get_property("textContent") == shown.get_property("textContent")
    return shown.text


def about(browser, image: int = 0) -> str:
    return read(browser, "about", image)


def press(browser, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def read_view(browser) -> dict:
    """Of the first card: values in multiples of the average patch, the ends of the scale."""
    script = "const {values, ofPrefix, low, high} = cards[0].view; "
    return browser.execute_script(
        CARDS + script + "return {low, high, values: [...values], prefix: [...ofPrefix || []]}"
    )


def restore(rows: dict, num_prefix: int) -> np.ndarray:
    maxima = np.frombuffer(base64.b64decode(rows["maxima"]), dtype="<f4").reshape(-1, 2)
    values = decode(rows["values"]).reshape(len(maxima), -1) / 255
    values[:, :num_prefix] *= maxima[:, :1]
    values[:, num_prefix:] *= maxima[:, 1:]
    return values


def pixels(browser, canvas, script: str = PIXELS) -> np.ndarray:
    width, height = canvas.get_property("width"), canvas.get_property("height")
    return (
        np.array(browser.execute_script(script, canvas))
        .reshape(height, width, 4)[..., :3]
        .astype(int)
    )


@pytest.mark.browser
def test_it_opens_from_disk_without_errors_or_alerts(browser, page: tuple) -> None:
    canvases = open_page(browser, page[0])
    assert len(canvases) == 2
    assert browser.title == "Maps & <b>more</b>"
    assert browser.find_elements("tag name", "strong")[1].text == NASTY
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert about(browser).startswith("attention rollout (the same for every class)")
    verdicts = [image["verdicts"]["rollout"] for image in page[1]["images"]]
    badges = browser.find_elements("class name", "badge")
    assert [badge.text[2:] for badge in badges] == [f"map {verdict}" for verdict in verdicts]
    said = [badge.get_attribute("aria-label") for badge in badges]
    assert said == [f"patch-removal test: {verdict}" for verdict in verdicts]


@pytest.mark.browser
def test_selectors_change_the_map_and_what_is_said_of_it(browser, page: tuple) -> None:
    (first, _) = open_page(browser, page[0])
    rollout = browser.execute_script(PIXELS, first)
    choose(browser, "method", "cdam")
    choose(browser, "class", "</script><b>dog")
    assert about(browser) == "evidence for </script><b>dog (red) and against </script><b>dog (blue)"
    dog = browser.execute_script(PIXELS, first)
    choose(browser, "class", "bird")
    assert browser.execute_script(PIXELS, first) != dog != rollout
    assert read(browser, "facts") == ""  # folded
    browser.find_element("css selector", ".numbers summary").click()
    facts = read(browser, "facts")
    assert "correlation with the loss without each patch" in facts
    assert "in prefix tokens" in facts
    assert "class-discriminative attention map" in facts
    assert read(browser, "verdict").startswith(f"map {page[1]['images'][0]['verdicts']['cdam']}: ")
    assert find_most(browser).startswith("highest: row ")


@pytest.mark.browser
@pytest.mark.parametrize("method", ["rollout", "cdam"])
def test_opacity_zero_shows_the_photo(browser, page: tuple, method: str) -> None:
    (first, _) = open_page(browser, page[0])
    choose(browser, "method", method)
    set_opacity(browser, 0)
    clear = pixels(browser, first)
    set_opacity(browser, 100)
    full = pixels(browser, first)
    photo, middle = pixels(browser, first, PHOTO), clear.shape[1] // 2
    inside = slice(middle - 50, middle + 50)
    assert np.array_equal(clear[:, inside], photo[:, inside])
    assert not np.array_equal(clear, full)
    plain = browser.find_element("css selector", "canvas.photo")
    assert np.array_equal(pixels(browser, plain), photo)  # beside the map


@pytest.mark.browser
@pytest.mark.parametrize("method", ["rollout", "cdam"])
def test_the_overlay_is_that_of_the_pictures(browser, page: tuple, method: str) -> None:
    from vit.explanation.render.overlay import blend
    from vit.explanation.render.scale import ColourScale

    (first, _) = open_page(browser, page[0])
    choose(browser, "method", method)
    set_opacity(browser, 100)
    shown, photo = pixels(browser, first), pixels(browser, first, PHOTO)
    found = next(
        each for each in page[1]["images"][0]["maps"] if each["method"] == method
    )  # the most probable class
    name = f"a.{method}" + (f".{clean_name(found['target']['name'])}" if found["target"] else "")
    scale = ColourScale(*found["ends"], found["signed"])
    geometry = Preprocess(image_size=(32, 32)).geometry((60, 40))
    picture = Image.fromarray(photo.astype(np.uint8))
    expected, lined = (
        np.asarray(
            blend(
                picture,
                relative_to_uniform(page[2][name]),
                geometry,
                scale=scale,
                opacity=1.0,
                lines=lines,
            )
        ).astype(int)
        for lines in (False, True)
    )
    # the browser smooths the edges of lines
    is_line = binary_dilation((lined != expected).any(axis=-1), iterations=3)
    assert 0 < is_line.mean() < 0.6
    # two roundings to 256 colours; near its zero the opacity of a signed map changes faster
    assert np.abs(shown - expected)[~is_line].max() <= (12 if found["signed"] else 6)
    # white lines where the pictures have them
    white = (lined == 255).all(axis=-1) & (expected != 255).all(axis=-1)
    near_white = binary_dilation((shown > 230).all(axis=-1), iterations=1)
    assert near_white[white].mean() > 0.95
    assert near_white[~is_line].mean() < 0.05


def tokens_after(layer: int) -> np.ndarray:
    """Of the first image, [N, D]."""
    bundle = make_bundle()
    (item,) = make_items(["a.png"])
    pixels = torch.from_numpy(bundle.preprocess.to_uint8(item.read()[0]).copy())
    batch = bundle.preprocess.normalize(pixels[None])
    forward = run_forward(bundle.model, batch, block_tokens=True)
    return forward.record.layers[layer].block_tokens[0].numpy()


@pytest.mark.browser
def test_tokens_are_shown_by_colour_norm_and_similarity(browser, page: tuple) -> None:
    from selenium.webdriver import ActionChains

    (first, _) = open_page(browser, page[0])
    plain = browser.execute_script(PIXELS, first)
    choose(browser, "method", "token colours")
    assert "after layer 1" in about(browser)
    assert browser.execute_script(PIXELS, first) != plain

    choose(browser, "method", "token norms")
    choose(browser, "layer", "0")
    assert "above 2× the median" in about(browser)
    norms = np.linalg.norm(tokens_after(0), axis=1)
    expected = norms[1:] / np.sort(norms[1:])[8]
    np.testing.assert_allclose(read_view(browser)["values"], expected, rtol=0.02)

    choose(browser, "method", "similarity to a patch")
    assert about(browser) == "point at a patch to see which others are like it"
    # beside the middle, in row 2, column 2
    ActionChains(browser).move_to_element_with_offset(first, 3, 3).perform()
    assert about(browser).startswith("similarity to patch (row 2, column 2) after layer 0")
    directions = tokens_after(0) / norms[:, None]
    expected = directions[1:] @ directions[1 + 2 * 4 + 2]
    assert np.abs(np.array(read_view(browser)["values"]) - expected).max() < 0.02

    # not by the pointer: what it leaves changes, and the button moves
    expand = browser.find_element("class name", "expand")
    browser.execute_script("arguments[0].click()", expand)
    shown = browser.find_elements("css selector", ".effect")
    effects = np.array(page[1]["images"][0]["tokens"]["effects"]).ravel()
    texts = [float(each.text.replace("−", "-")) for each in shown]
    np.testing.assert_allclose(texts, effects, rtol=0.06)


@pytest.mark.browser
def test_pointing_at_a_patch_shows_its_attention(browser, page: tuple) -> None:
    from selenium.webdriver import ActionChains

    (first, _) = open_page(browser, page[0])
    before = browser.execute_script(PIXELS, first)
    ActionChains(browser).move_to_element_with_offset(
        first, 3, 3
    ).perform()  # just right of and below the middle
    assert about(browser) == "what patch (row 2, column 2) attends to: rollout"
    rollout = restore(page[1]["images"][0]["tokens"]["attention"][0], 1)
    assert read_view(browser)["values"] == pytest.approx(rollout[1 + 10, 1:] * 17, abs=1e-5)
    assert browser.execute_script(PIXELS, first) != before
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert about(browser).startswith("attention rollout (the same for every class)")
    assert browser.execute_script(PIXELS, first) == before


@pytest.mark.browser
def test_a_click_keeps_a_token_and_both_directions_are_shown(browser, page: tuple) -> None:
    from selenium.webdriver import ActionChains

    (first, _) = open_page(browser, page[0])
    attention = {
        (each["layer"], each["head"]): each for each in page[1]["images"][0]["tokens"]["attention"]
    }
    choose(browser, "method", "attention of a layer")
    choose(browser, "layer", "0")
    choose(browser, "head", "1")
    matrix = restore(attention[0, 1], 1) * 17
    ActionChains(browser).move_to_element_with_offset(first, 3, 3).click().perform()
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert about(browser) == "what patch (row 2, column 2) attends to: layer 0 head 1"
    choose(browser, "direction", "is attended to by")
    assert about(browser) == "what attends to patch (row 2, column 2): layer 0 head 1"
    view = read_view(browser)
    assert view["values"] == pytest.approx(matrix[1:, 11], abs=1e-4)
    assert view["prefix"] == pytest.approx(matrix[:1, 11], abs=1e-4)
    browser.find_element("css selector", ".tokens button").click()
    assert about(browser) == "what attends to the class token: layer 0 head 1"
    assert read_view(browser)["values"] == pytest.approx(matrix[1:, 0], abs=1e-4)
    assert (
        browser.find_element("css selector", ".tokens button").get_attribute("aria-pressed")
        == "true"
    )
    choose(browser, "direction", "attends to")
    assert read_view(browser)["values"] == pytest.approx(matrix[0, 1:], abs=1e-4)
    browser.find_element("css selector", ".tokens button").click()  # lets it go
    assert about(browser) == "what the classifier reads: layer 0 head 1"


@pytest.mark.browser
def test_the_difference_of_two_classes_is_that_of_their_maps(browser, page: tuple) -> None:
    open_page(browser, page[0])
    choose(browser, "method", "cdam")
    choose(browser, "class", "bird")
    choose(browser, "minus", "cat")
    assert about(browser) == "evidence for bird (red) and for cat (blue)"
    bird, cat = (page[2][f"a.cdam.{name}"].ravel() for name in ("bird", "cat"))
    even = np.abs(bird).mean()
    view, tolerance = (
        read_view(browser),
        float((np.abs(bird).max() + np.abs(cat).max()) / 255 / even),
    )
    assert view["values"] == pytest.approx((bird - cat) / even, abs=tolerance)
    assert view["high"] == -view["low"] == pytest.approx(np.abs(view["values"]).max())
    choose(browser, "method", "gae")  # maps of one sign are compared by their shares
    bird, cat = (page[2][f"a.gae.{name}"].ravel() for name in ("bird", "cat"))
    assert read_view(browser)["values"] == pytest.approx(
        bird / bird.mean() - cat / cat.mean(), abs=0.05
    )
    choose(browser, "minus", "nothing")
    assert about(browser) == "evidence for bird"


@pytest.mark.browser
def test_the_logit_lens_is_shown_for_each_token_and_layer(browser, page: tuple) -> None:
    open_page(browser, page[0])
    image = page[1]["images"][0]
    lens = image["tokens"]["lens"]
    classes = np.frombuffer(base64.b64decode(lens["classes"]), dtype="<u2").reshape(2, 17)
    of_targets = decode(lens["target_probabilities"]).reshape(3, 2, 17) / 2.55
    choose(browser, "method", "logit lens")
    choose(browser, "layer", "0")
    predicted = image["predicted"]["name"]
    assert (
        about(browser)
        == f"probability of {predicted} that each patch alone would give after layer 0"
    )
    assert read_view(browser)["values"] == pytest.approx(of_targets[0, 0, 1:], abs=1e-4)
    row, column = divmod(int(of_targets[0, 0, 1:].argmax()), 4)
    highest = f"row {row} column {column} ({of_targets[0, 0, 1:].max():.0f} %)"
    browser.find_element("css selector", ".numbers summary").click()
    assert find_most(browser).startswith(f"highest: {highest}, ")
    browser.find_element("css selector", "canvas.map").send_keys(
        "\ue014"
    )  # arrow right: the patch in the middle
    expected = f"patch (row 2, column 2) alone: {CLASSES[classes[0, 11]]} "
    assert about(browser).startswith(expected)
    browser.find_element("class name", "expand").click()
    layers = [row.text for row in browser.find_elements("css selector", ".lens tr")][:2]
    assert [CLASSES[classes[layer, 11]] in text for layer, text in enumerate(layers)] == [
        True,
        True,
    ]
    assert layers[1].startswith("layer 1")


@pytest.mark.browser
def test_layers_and_heads_are_a_grid_and_one_click_shows_one(browser, page: tuple) -> None:
    from selenium.webdriver import Keys

    open_page(browser, page[0])
    browser.find_element("class name", "expand").click()
    buttons = browser.find_elements("css selector", "figure:first-of-type .heads button")
    assert len(buttons) == 2 * (1 + 3)  # the mean and three heads in each of two layers
    buttons[-1].click()
    assert about(browser) == "what the classifier reads: layer 1 head 2"
    pooled = restore(page[1]["images"][0]["tokens"]["pooled"], 1)
    assert read_view(browser)["values"] == pytest.approx(pooled[5, 1:] * 17, abs=1e-4)
    focused = browser.switch_to.active_element
    assert focused.get_attribute("aria-label").startswith("layer 1 head 2, highest ")
    press(browser, Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ENTER)
    assert about(browser) == "what the classifier reads: layer 0 head 1"


@pytest.mark.browser
def test_everything_can_be_done_by_keyboard(browser, page: tuple) -> None:
    from selenium.webdriver import Keys

    open_page(browser, page[0])
    seen = []
    for _ in range(14):
        press(browser, Keys.TAB)
        focused = browser.switch_to.active_element
        seen.append(focused.get_attribute("id") or focused.tag_name)
        if focused.tag_name == "canvas":
            break
    # selectors with a single choice are passed over
    assert "class" not in seen
    # filters and views are behind "More"
    assert seen[-3:] == ["method", "summary", "canvas"]
    press(browser, Keys.ARROW_RIGHT)
    assert about(browser) == "what patch (row 2, column 2) attends to: rollout"
    press(browser, Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert about(browser) == "what patch (row 1, column 0) attends to: rollout"
    press(browser, Keys.ENTER, Keys.TAB)  # kept, and on to the class token's button
    assert about(browser) == "what patch (row 1, column 0) attends to: rollout"
    press(browser, Keys.ENTER)
    assert about(browser) == "what the class token attends to: rollout"
    press(browser, Keys.ESCAPE)
    assert about(browser).startswith("attention rollout (the same for every class)")


@pytest.mark.browser
def test_it_says_to_screen_readers_what_is_shown(browser, page: tuple) -> None:
    open_page(browser, page[0])
    unnamed = browser.execute_script(
        "return [...document.querySelectorAll('canvas, select, input, button')].filter(each => each.checkVisibility()"
        " && !(each.ariaLabel || each.textContent.trim() || each.closest('label, button'))).map(each => each.outerHTML)"
    )
    assert unnamed == []
    canvas = browser.find_element("css selector", "canvas.map")
    assert (
        canvas.get_attribute("aria-label") == "a.png: rollout; the arrow keys move between patches"
    )
    (live,) = browser.find_elements("css selector", "[aria-live=polite]")  # of all cards one
    assert "attention rollout" in live.text
    assert "highest: row " in live.text
    browser.find_elements("css selector", "canvas.map")[1].send_keys("\ue014")  # arrow right
    live = browser.find_elements("class name", "said")[1]
    assert live.get_attribute("aria-live") == "polite"
    assert live.text.startswith("what patch (row 2, column 2) attends to: rollout")
    choose(browser, "method", "gae")  # changes both
    assert len(browser.find_elements("css selector", "[aria-live=polite]")) == 1


@pytest.mark.browser
def test_the_models_input_is_the_box_in_its_own_shape(browser, page: tuple) -> None:
    (first, _) = open_page(browser, page[0])
    assert [first.get_property(side) for side in ("width", "height")] == [400, 267]
    choose(browser, "frame", "the model's input")
    assert [first.get_property(side) for side in ("width", "height")] == [400, 400]
    set_opacity(browser, 0)
    centres = ((np.arange(32) + 0.5) * 400 / 32).astype(
        int
    )  # of the 32 × 32 pixels that the model sees
    shown = pixels(browser, first)[centres][:, centres]
    photo = base64.b64decode(page[1]["images"][0]["photo"].split(",")[1])
    expected = Preprocess(image_size=(32, 32)).to_uint8(Image.open(io.BytesIO(photo))).astype(float)
    assert (
        np.corrcoef(shown.ravel(), expected.ravel())[0, 1] > 0.8
    )  # noise, resized by another filter


@pytest.mark.browser
def test_methods_stand_side_by_side(browser, page: tuple) -> None:
    open_page(browser, page[0])
    choose(browser, "view", "methods side by side")
    panels = browser.find_elements("css selector", "figure:first-of-type .panels > div")
    of_image = {
        found["method"]: found["sanity_check"]["verdict"]
        for found in page[1]["images"][0]["maps"][::-1]
    }
    # of the most probable class
    verdicts = [[method, f"map {of_image[method]}"] for method in ("rollout", "gae", "cdam")]
    found = [panel.text.splitlines() for panel in panels]
    assert [[name, *(text[2:] for text in badges)] for name, *badges in found] == [
        ["photo"],
        *verdicts,
    ]
    canvases = browser.find_elements("css selector", "figure:first-of-type canvas.map")
    pictures = [browser.execute_script(PIXELS, canvas) for canvas in canvases]
    assert pictures[0] != pictures[1] != pictures[2]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict[str, np.ndarray]]:
    items = make_items([f"{number:03d}.png" for number in range(90)])
    settings = {"methods": ("gae",), "target": "auto", "sanity_checks": False}
    return write_gallery(tmp_path_factory.mktemp("many"), make_bundle(), items, **settings)


def shown(browser) -> list[str]:
    return [
        each.get_attribute("textContent") for each in browser.find_elements("class name", "path")
    ]


@pytest.mark.extended
@pytest.mark.browser
def test_all_images_come_as_one_scrolls_and_are_filtered_and_sorted(browser, many: tuple) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    path, data, _ = many
    open_page(browser, path)
    assert len(shown(browser)) < 90
    while (before := len(shown(browser))) < 90:
        browser.execute_script("scrollTo(0, document.body.scrollHeight)")
        WebDriverWait(browser, 10).until(lambda _, before=before: len(shown(browser)) > before)
    assert shown(browser) == [f"{number:03d}.png" for number in range(90)]
    drawn = browser.execute_script(
        CARDS + "return cards.filter(card => card.panels.at(-1).canvas.width).length"
    )
    assert 0 < drawn < 90  # far ones gave their memory back
    choose(browser, "sort", "least confident first")
    top = "return document.querySelector('figure').getBoundingClientRect().top"
    assert 0 < browser.execute_script(top) < 400  # not in the middle of them
    confidence = {image["title"]: image["predicted"]["percent"] for image in data["images"]}
    found = [confidence[path] for path in shown(browser)]
    assert found == sorted(confidence.values())[: len(found)]
    counts = Counter(image["predicted"]["name"] for image in data["images"])
    name, count = counts.most_common()[-1]
    choose(browser, "predicted", f"{name} ({count})")
    assert browser.find_element("id", "count").text == f"{count} of 90 images."
    choose(browser, "predicted", "every class")
    sure = sorted(path for path, percent in confidence.items() if 50 <= percent < 90)
    choose(browser, "sort", "as given")
    choose(browser, "confidence", f"50 to 90 % ({len(sure)})")
    assert browser.find_element("id", "count").text == f"{len(sure)} of 90 images."
    assert (found := shown(browser)) == sure[: len(found)] != []
    choose(browser, "confidence", "every confidence")
    choose(browser, "predicted", f"{name} ({count})")
    predicted = {image["title"]: image["predicted"]["name"] for image in data["images"]}
    assert {predicted[path] for path in shown(browser)} == {name}


@pytest.mark.browser
def test_the_verdict_filters(browser, page: tuple) -> None:
    open_page(browser, page[0])
    of_images = [image["verdicts"]["rollout"] for image in page[1]["images"]]
    for verdict in {
        verdict for image in page[1]["images"] for verdict in image["verdicts"].values()
    }:
        choose(browser, "verdict", verdict)
        assert len(shown(browser)) == of_images.count(verdict)


@pytest.mark.browser
def test_each_images_own_class_is_no_menu_of_classes(browser, many: tuple) -> None:
    """With `--class auto` a class of the menu had a map for some of the images and fell back for
    the others."""
    open_page(browser, many[0])
    labels = browser.find_elements("css selector", "label[for=class], label[for=minus]")
    assert [label.is_displayed() for label in labels] == [False, False]
    for number, image in enumerate(many[1]["images"][:3]):
        assert about(browser, number) == f"evidence for {image['predicted']['name']}"


@pytest.mark.browser
def test_a_class_that_an_image_was_not_explained_for_says_so(browser, tmp_path: Path) -> None:
    settings = {"sanity_checks": False, "methods": ("gae",), "target": "top2"}
    items = make_items([f"{n}.png" for n in range(90)])
    path, data, _ = write_gallery(tmp_path, make_bundle(), items, **settings)
    targets = [image["targets"] for image in data["images"][:24]]
    explained = Counter(index for each in targets for index in each)
    index = next(index for index, count in explained.items() if count < 24)
    open_page(browser, path)
    choose(browser, "class", CLASSES[index])
    browser.execute_script(CARDS + "for (const card of cards) { card.near = true; card.draw(); }")
    expected = "no map of this class was made for this image"
    assert [about(browser, n) == expected for n in range(24)] == [
        index not in each for each in targets
    ]
    choose(browser, "class", "2nd most probable")
    assert expected not in {about(browser, n) for n in range(3)}


@pytest.mark.browser
def test_light_and_dark_follow_the_system(browser, page: tuple) -> None:
    colours = {}
    for scheme in ("light", "dark"):
        feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
        open_page(browser, page[0])
        colours[scheme] = browser.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert colours == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}


@pytest.mark.browser
def test_it_opens_on_the_first_method_and_says_what_is_unusual(browser, tmp_path: Path) -> None:
    bundle, items = make_bundle(), make_items(["a"])
    settings = {"methods": ("rollout", "gae", "cdam")}
    for p_value, note in ((None, "unsure"), (0.012, "unusual")):
        gallery = Gallery(bundle, num_images=1)

        def add(
            images: list[ImageResult],
            gallery: Gallery = gallery,
            p_value: float | None = p_value,
            note: str = note,
        ) -> None:
            gallery.add([replace(image, p_value=p_value, note=note) for image in images])

        explain_with(bundle, items, settings, add, token_bytes=gallery.token_bytes)
        gallery.write(tmp_path / "gallery.html", title="first")
        open_page(browser, tmp_path / "gallery.html")
        chosen = browser.execute_script(
            "return document.getElementById('method').selectedOptions[0].text"
        )
        assert chosen == "rollout"
        badge = browser.find_elements("class name", "badge")[0]
        assert badge.text == ("! unusual" if note == "unusual" else "? unsure")
    badge, tested = browser.find_elements("class name", "badge")
    assert (badge.text, tested.text) == ("! unusual", "– map not tested")
    assert badge.get_attribute("aria-label") == "unusual: unlike the training photos (p = 0.012)"
    assert browser.find_element("id", "count").text == "1 image, 1 unusual."
    browser.find_element("css selector", ".numbers summary").click()
    assert read(browser, "verdict").startswith("map not tested: ")


FIRST_PICTURE = """
const put = CanvasRenderingContext2D.prototype.putImageData;
CanvasRenderingContext2D.prototype.putImageData = function (...values) {
  window.firstPicture ??= performance.now();
  return put.apply(this, values);
};
"""


@pytest.mark.extended
@pytest.mark.browser
def test_the_first_of_two_hundred_photos_is_there_in_three_seconds(browser, tmp_path: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    bundle = make_bundle(size=224, patch=16, depth=12, heads=12)
    settings, gallery = (
        {"methods": ("rollout", "gae")},
        Gallery(bundle, num_images=200),
    )
    items = make_items(["a", "b"], size=(640, 480))
    explain_with(bundle, items, settings, gallery.add, token_bytes=gallery.token_bytes)
    gallery._images *= 100
    gallery._summaries *= 100
    gallery.write(path := tmp_path / "gallery.html", title="two hundred")
    assert 20e6 < path.stat().st_size < 70e6
    browser.execute_cdp_cmd("Page.enable", {})
    script = browser.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": FIRST_PICTURE}
    )
    try:
        browser.get(path.as_uri())
        WebDriverWait(browser, 60).until(
            lambda _: browser.execute_script("return window.firstPicture")
        )
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    print(
        f"first picture of 200 after {browser.execute_script('return window.firstPicture'):.0f} ms"
    )
    assert browser.execute_script("return window.firstPicture") < 3000
    assert browser.find_element("id", "count").text == "200 images."
    browser.execute_script(
        "scrollTo(0, document.body.scrollHeight)"
    )  # on to those that came after the script
    WebDriverWait(browser, 10).until(lambda _: len(shown(browser)) > 48)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.browser
def test_text_is_legible_and_a_phone_scrolls_down_only(browser, page: tuple) -> None:
    open_page(browser, page[0])
    for element in browser.find_elements("css selector", "details > summary, button.expand"):
        element.click()
    assert find_low_contrast(browser) == []
    assert find_unnamed(browser) == []
    with phone(browser):
        open_page(browser, page[0])
        # pictures come first, the rest is folded
        begin = "return document.querySelector('.panels').getBoundingClientRect().top / innerHeight"
        assert browser.execute_script(begin) < 1 / 3
        assert not browser.find_element("id", "view").is_displayed()
        assert find_wide(browser) == []


@pytest.mark.browser
def test_cards_show_the_nearest_training_photos_and_run_no_name(
    browser, named_bundle: Bundle, tmp_path: Path
) -> None:
    path, data = write_named_gallery(tmp_path, named_bundle)
    browser.get_log("browser")
    open_page(browser, path)
    first = browser.find_element("css selector", "figure .neighbours")
    assert first.get_attribute("aria-label") == "Nearest training photos"
    items = first.find_elements("tag name", "li")
    for item, row in zip(items, data["images"][0]["neighbours"], strict=True):
        assert item.find_element("tag name", "img").get_attribute("alt") == (
            f"training photo {row['path']}"
        )
        said = [span.text for span in item.find_elements("tag name", "span")]
        name = row["path"].rpartition("/")[2]
        assert said == [f"{row['class_name']}, {row['similarity']:.2f}", name]
    assert find_unnamed(browser) == []
    assert find_low_contrast(browser) == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    with phone(browser):
        assert find_wide(browser) == []
