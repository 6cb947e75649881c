"""Photos with a colour profile are read in sRGB."""

import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from vit.data.images import read_image, to_rgb

SRGB = [(0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141)]
DISPLAY_P3 = [(0.5151, 0.2412, -0.0011), (0.2920, 0.6922, 0.0419), (0.1571, 0.0666, 0.7841)]
ADOBE_RGB = [(0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446)]


def build_profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """A profile of ICC version 2 with these tags."""
    tags = {
        b"wtpt": as_xyz((0.9642, 1, 0.8249)),
        b"desc": b"desc" + struct.pack(">II", 0, 5) + b"test" + bytes(79),
        b"cprt": b"text\0\0\0\0none\0",
        **tags,
    }
    body, rows = b"", struct.pack(">I", len(tags))
    for name, content in tags.items():
        start = 132 + 12 * len(tags) + len(body)
        rows += name + struct.pack(">II", start, len(content))
        body += content + bytes(-len(content) % 4)
    kinds = b"prtrCMYKLab " if space == b"CMYK" else b"mntr" + space + b"XYZ "
    size = 128 + len(rows) + len(body)
    head = struct.pack(">I4sI12s12x4s28x", size, b"lcms", 0x02100000, kinds, b"acsp")
    return head + struct.pack(">iii48x", 63190, 65536, 54061) + rows + body


def as_xyz(values: tuple[float, ...]) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(value * 65536) for value in values))


def as_curve(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def rgb_profile(primaries: list[tuple[float, float, float]]) -> bytes:
    columns = {b"rgb"[i : i + 1] + b"XYZ": as_xyz(xyz) for i, xyz in enumerate(primaries)}
    return build_profile(
        b"RGB ", columns | dict.fromkeys([b"rTRC", b"gTRC", b"bTRC"], as_curve(2.2))
    )


def cmyk_profile() -> bytes:
    """Four inks that make Lab darker, but no colour."""
    inks = np.array(list(np.ndindex(2, 2, 2, 2)))
    light = np.rint(255 * (1 - inks @ [0.2, 0.2, 0.1, 0.5])).astype(np.uint8)
    colours = np.stack([light, np.full(16, 128, np.uint8), np.full(16, 128, np.uint8)], axis=-1)
    identity = struct.pack(">9i", *(65536 * (place % 4 == 0) for place in range(9)))
    curve = bytes(range(256))
    table = b"mft1\0\0\0\0\4\3\2\0" + identity + curve * 4 + colours.tobytes() + curve * 3
    return build_profile(b"CMYK", {b"A2B0": table})


def read_colour(path: Path, mode: str, profile: bytes | None) -> tuple[int, ...]:
    colour = Image.new("RGB", (16, 16), (60, 180, 70)).convert(mode)
    options = {"quality": 100, "subsampling": 0} if path.suffix == ".jpg" else {}
    colour.save(path, icc_profile=profile, **options)
    image = read_image(path)
    # what is read is not converted again
    assert to_rgb(image).getpixel((4, 4)) == image.getpixel((4, 4))
    return image.getpixel((4, 4))


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_wide_colours_become_srgb(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    for primaries, expected in [(DISPLAY_P3, (0, 185, 45)), (ADOBE_RGB, (0, 181, 57))]:
        found = read_colour(path, "RGB", rgb_profile(primaries))
        np.testing.assert_allclose(found, expected, atol=2)
    if suffix == "png":
        assert read_colour(path, "RGBA", rgb_profile(DISPLAY_P3)) == (0, 185, 45)
        assert read_colour(path, "P", rgb_profile(DISPLAY_P3))[0] == 0


def test_profiles_that_change_nothing_leave_every_pixel(tmp_path: Path) -> None:
    builtin = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    grey = build_profile(b"GRAY", {b"kTRC": as_curve(1.8)})
    # sRGB, broken, and of an image in another mode
    for profile in (None, builtin, rgb_profile(SRGB), b"broken" * 30, grey, cmyk_profile()):
        assert read_colour(tmp_path / "a.png", "RGB", profile) == (60, 180, 70)


def test_grey_photos_and_inks_are_converted_by_their_profiles(tmp_path: Path) -> None:
    plain = read_colour(tmp_path / "a.jpg", "L", None)
    grey = build_profile(b"GRAY", {b"kTRC": as_curve(1.8)})
    assert read_colour(tmp_path / "a.jpg", "L", grey)[0] > plain[0] + 10
    red, green, blue = read_colour(tmp_path / "a.jpg", "CMYK", cmyk_profile())
    assert max(red, green, blue) - min(red, green, blue) <= 3
