"""Photos with a colour profile are read in sRGB."""

from pathlib import Path

import pytest
from PIL import Image, ImageCms

from vit.data.images import read_image, to_rgb

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# red and blue are exchanged, and the description isn't sRGB's any more
SWAPPED = (
    SRGB.replace(b"rXYZ", b"....")
    .replace(b"bXYZ", b"rXYZ")
    .replace(b"....", b"bXYZ")
    .replace("sRGB".encode("utf-16-be"), "test".encode("utf-16-be"))
)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_become_those_of_srgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    image = Image.new("RGB", (16, 16), (204, 51, 102)).convert(mode)
    image.save(path, icc_profile=SWAPPED)
    plain = image.convert("RGB").getpixel((4, 4))
    found = read_image(path)
    assert found.getpixel((4, 4)) == pytest.approx(plain[::-1], abs=2)
    assert to_rgb(found).getpixel((4, 4)) == found.getpixel((4, 4))
    for profile in (SRGB, b"broken" * 30, None):
        image.save(path, icc_profile=profile)
        assert read_image(path).getpixel((4, 4)) == plain
