"""Every kind of image file becomes upright RGB, or one sentence; geometry says where the input
lies."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from tests.conftest import Launcher
from vit.data.images import list_files, list_images, read_image
from vit.data.preprocess import Preprocess


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack(
        [x * 255 // width, y * 255 // height, (x + y) * 127 // (height + width)], -1
    ).astype(np.uint8)


def save(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    rgba = np.zeros((4, 4, 4), dtype=np.uint8)
    rgba[..., 0], rgba[:, 2:, 3], rgba[2:, :2, 3] = 200, 255, 128
    image = np.asarray(read_image(save(Image.fromarray(rgba), tmp_path / "a.png")))
    np.testing.assert_array_equal(image[0, 0], [255, 255, 255])
    np.testing.assert_array_equal(image[0, 3], [200, 0, 0])
    np.testing.assert_allclose(image[3, 0], [227, 127, 127], atol=1)
    palette = Image.fromarray(rgba[..., 0]).convert("P")
    hole = palette.getpixel((0, 0))
    keyed = save(palette, tmp_path / "keyed.png", transparency=hole)
    np.testing.assert_array_equal(np.asarray(read_image(keyed))[0, 0], [255, 255, 255])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = smooth(20, 30)
    undo = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = Image.fromarray(np.ascontiguousarray(undo(upright)))
    for suffix in ("png", "tif", "webp", "jpg"):
        options = {"lossless": True} if suffix == "webp" else {}
        image = read_image(save(turned, tmp_path / f"a.{suffix}", exif=exif, **options))
        difference = np.asarray(image).astype(int) - upright
        assert np.abs(difference).mean() < (3 if suffix == "jpg" else 1e-9), suffix


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "gif", "bmp"])
def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = save(Image.fromarray(noise), tmp_path / f"whole.{suffix}")
    data = path.read_bytes()
    for fraction in (0.0, 0.1, 0.9, 0.99):
        cut = tmp_path / f"cut.{suffix}"
        cut.write_bytes(data[: int(len(data) * fraction)])
        with pytest.raises(ValueError, match=rf"cut\.{suffix} can't be read as an image"):
            read_image(cut)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "page.jpg").write_text("<!DOCTYPE html><title>404</title>")
    with pytest.raises(ValueError, match=r"page\.jpg can't be read as an image: it is not one of"):
        read_image(tmp_path / "page.jpg")
    with pytest.raises(FileNotFoundError):
        read_image(tmp_path / "absent.jpg")


def test_preprocess_equals_torchvisions_resize_and_centre_crop() -> None:
    # 48×64 scaled by a half covers 24×32 exactly, so no sub-pixel choice differs
    image = Image.fromarray(smooth(48, 64))
    reference = v2.Compose(
        [v2.Resize(24, v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(20)]
    )
    got = Preprocess((20, 20), crop_pct=20 / 24).to_uint8(image)
    np.testing.assert_array_equal(got, np.asarray(reference(image)))


def test_normalization_is_the_formula() -> None:
    preprocess = Preprocess((5, 4), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    pixels = torch.randint(
        0, 256, (2, 5, 4, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    expected = (pixels.double() / 255 - torch.tensor([0.1, 0.2, 0.3])) / torch.tensor(
        [0.5, 0.6, 0.7]
    )
    expected = expected.permute(0, 3, 1, 2)
    torch.testing.assert_close(preprocess.normalize(pixels).double(), expected, atol=1e-6, rtol=0)
    images = [Image.fromarray(pixels[0].numpy()), Image.fromarray(smooth(9, 30))]
    assert preprocess(images).shape == (2, 3, 5, 4)
    torch.testing.assert_close(preprocess(images)[0].double(), expected[0], atol=1e-6, rtol=0)


def test_preprocess_survives_json_and_refuses_nonsense() -> None:
    preprocess = Preprocess((16, 24), crop_pct=0.9, value_range=(-1.5, 2), resize_mode="stretch")
    assert Preprocess.from_dict(preprocess.to_dict()) == preprocess
    for wrong in (
        {"image_size": (0, 3)},
        {"crop_pct": 1.5},
        {"interpolation": "nearest"},
        {"value_range": (3, 3)},
        {"resize_mode": "pad"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Preprocess.from_dict(preprocess.to_dict() | wrong)


def test_decoding_needs_no_torch(cli: Launcher) -> None:
    code = "import sys, vit.data.cache; sys.exit('torch' in sys.modules)"
    cli.finish(cli.start(program=("-c", code)))


def test_no_size_and_crop_push_the_box_over_an_edge() -> None:
    """Rounding once made the box start at -1e-14, which Pillow refuses."""
    for width, height in itertools.product(range(90, 520, 7), range(90, 520, 11)):
        for size, fraction in ((128, 0.875), (96, 0.9), (224, 0.875)):
            box = Preprocess((size, size), fraction).geometry((width, height)).box
            whole = Preprocess((round(size / fraction),) * 2).geometry((width, height)).box
            assert min(*box[:2], *whole[:2]) >= 0
            assert box[2] <= width
            assert box[3] <= height


def test_a_directory_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "locked/b.png", "lost+found/c.png", "z/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    scan = os.scandir

    def scandir(path: str) -> Any:
        if os.path.basename(path) in ("locked", "lost+found"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for read in (list_images, list_files):
        with pytest.raises(PermissionError, match="locked"):
            list(read(tmp_path))
