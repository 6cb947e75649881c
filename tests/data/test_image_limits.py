"""Images that would take too much memory are refused."""

from pathlib import Path

import pytest
from PIL import Image

from vit.data.images import read_image


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path) -> None:
    for height, sentence in (
        (5_001, "20,000 x 5,001 pixels, more than 100,000,"),
        (10_000, "bomb"),
    ):
        Image.new("1", (20_000, height)).save(tmp_path / "a.png")
        with pytest.raises(ValueError, match=f"a.png can't be read as an image: .*{sentence}"):
            read_image(tmp_path / "a.png")
