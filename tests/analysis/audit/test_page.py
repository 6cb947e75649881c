"""The page of an audit, driven by keys: what is accepted is in the file that it saves."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.browser import find_low_contrast, find_unnamed, phone
from tests.conftest import SaveModel
from vit.data.corrections import read_corrections

CLASSES = ("<b>red", '"blue",')


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Any:
    """Red and blue images; three of the red ones are blue."""
    root = tmp_path_factory.mktemp("audit") / "photos"
    random = np.random.default_rng(0)
    for label, class_name in enumerate(CLASSES):
        (root / class_name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            is_blue = label == 1 or number < 3
            pixels[..., 2 if is_blue else 0] += 150
            Image.fromarray(pixels).save(root / class_name / f"{number:02d}, a.png")
    weights = save_model(root.parent / "model.safetensors")
    return vit.audit(root, init=weights, group_by="([0-9])9, a")


@pytest.fixture(scope="module")
def page(result: Any, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("page")
    result.save(folder / "audit")
    browser.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)}
    )
    browser.get((folder / "audit" / "audit.html").as_uri())
    browser.folder = folder
    return browser


def test_the_first_suspects_have_a_map_and_their_neighbours(result: Any, tmp_path: Path) -> None:
    result.save(tmp_path / "audit")
    text = (tmp_path / "audit" / "audit.html").read_text()
    num_suspects = len(result.audit.label_errors)
    assert num_suspects >= 3
    # 09 and 19 of both classes are two groups, the others are alone
    assert len(set(result.images.groups)) == 2 + 36
    # the model knows other classes
    assert text.count("attention rollout") == min(num_suspects, 24)
    assert text.count('alt="map of ') == min(num_suspects, 24)
    assert "Nearest images" in text


@pytest.mark.browser
def test_accepted_suspects_are_saved(page: Any, result: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    body = page.find_element("tag name", "body")
    # the first is accepted, the second rejected, the third accepted
    for key in ("j", "a", "r", "a"):
        body.send_keys(key)
    assert page.find_element("id", "status").text.startswith("2 accepted, 1 rejected")
    page.find_element("id", "save").send_keys(Keys.ENTER)
    file = page.folder / "corrections.csv"
    for _ in range(100):
        if file.exists():
            break
        time.sleep(0.05)
    errors = result.audit.label_errors
    expected = {error.path: error.suggested for error in (errors[0], errors[2])}
    assert read_corrections(file) == expected


@pytest.mark.browser
def test_a_phone_scrolls_down_only(page: Any) -> None:
    with phone(page):
        page.refresh()
        widths = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths == [390, 390]
    assert find_low_contrast(page) == []
    assert find_unnamed(page) == []
    assert page.get_log("browser") == []
