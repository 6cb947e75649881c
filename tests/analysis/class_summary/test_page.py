"""The page of a summary: names are text, it fits a phone, and flags have a reason."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.browser import find_low_contrast, find_unnamed, find_wide, phone
from vit.analysis.class_summary.images import SummaryImages
from vit.analysis.class_summary.page import _draw_in_context, build_summary_page
from vit.analysis.class_summary.records import Removal, Summary
from vit.analysis.class_summary.summarize import summarize_images
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.vision_transformer import VisionTransformer

NAMES = ("<img src=x onerror=document.title='owned'>", "a class whose name is long" * 4)


@pytest.fixture(scope="module")
def summary() -> Summary:
    """Summary of an untrained model; the first cluster of the first class is flagged."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=24, patch_size=4, num_classes=2, embed_dim=16, depth=1, num_heads=2
    )
    bundle = Bundle.from_model(model, class_names=NAMES, preprocess=Preprocess((24, 24)))
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 24, 3), dtype=np.uint8)
    labels = np.arange(24) % 2
    paths = [f"{NAMES[0]}/{number}.png" for number in range(24)]
    masks = np.ones((24, 24, 24), np.float32)
    result = summarize_images(
        bundle, SummaryImages(pixels, labels, paths, masks), method="libra-removal"
    )
    first, second = result.classes
    flagged = replace(
        first.clusters[0],
        is_flagged=True,
        suspicions=("at the same place off the centre",),
        extent=[3],
        removal=Removal(
            num_images=5,
            flips=3,
            random_flips=0,
            fall=0.4,
            random_fall=-0.026,
            log_odds=2.0,
            p_value=0.03,
        ),
    )
    return replace(result, classes=[replace(first, clusters=[flagged]), second], num_tests=1)


def test_names_are_text_and_the_page_needs_no_other_file(summary: Summary) -> None:
    page = build_summary_page(summary)
    assert "<img src=x" not in page
    assert "&lt;img src=x" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "1 likely shortcut:" in page
    assert 'class="cluster flagged"' in page
    text = (
        "Without it in 5 other images, and without the 1 patch where all its images show the same"
    )
    assert f"{text}: 3 predictions change, and the probability falls by 40.0 points." in page
    # a probability that rises doesn't fall by a negative number
    assert "same shape elsewhere: 0 predictions change, and the probability rises by 2.6 po" in page
    assert "-" not in "".join(re.findall(r"by (\S+) points", page))
    assert "inside the masks (12 images)" in page
    # a line and one patch of each of six clusters; one cluster was left in the first class
    for row, section in zip(summary.classes, page.split("<section")[1:], strict=True):
        shown, statistics = section.split("<details")
        assert shown.count("<img") == min(len(row.clusters), 6)
        assert "mean map" not in shown
        assert "mean map" in statistics


def test_a_large_patch_is_framed_among_its_neighbours(summary: Summary) -> None:
    """Patches of 4 pixels on a grid of 6 × 6, at the edge and inside."""
    pixels = np.zeros((24, 24, 3), np.uint8)
    pixels[8:12, 20:24, 0] = 255
    encoded = _draw_in_context(pixels, 2 * 6 + 5, summary.grid)
    with Image.open(io.BytesIO(base64.b64decode(encoded.partition(",")[2]))) as picture:
        values = np.asarray(picture.convert("RGB")).astype(int)
    assert values.shape == (144, 144, 3)
    side = 144 / 5
    # the last of five columns, the third of five rows
    red = np.argwhere((values[..., 0] > 150) & (values[..., 1] < 100))
    assert red.min(axis=0) == pytest.approx([2 * side, 4 * side], abs=7)
    assert red.max(axis=0) == pytest.approx([3 * side, 5 * side], abs=7)
    assert (values[72, 72] < 60).all()


@pytest.mark.browser
def test_a_phone_scrolls_down_only(summary: Summary, browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "summary.html"
    path.write_text(build_summary_page(summary), encoding="utf-8")
    browser.get(path.as_uri())
    with phone(browser):
        browser.refresh()
        assert find_wide(browser) == []
    assert find_low_contrast(browser) == []
    assert find_unnamed(browser) == []
    assert browser.title.startswith("class summary of ")
    assert browser.get_log("browser") == []
