"""Images that would take too much memory are refused."""

import struct
import zlib
from pathlib import Path

import pytest

from vit.data.images import read_image


def write_header(path: Path, *, width: int, height: int) -> None:
    """Write the beginning of a PNG of grey pixels, of which none follow."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks + struct.pack(">I", 100) + b"IDAT")


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path) -> None:
    for height, sentence in (
        (5_001, "20,000 x 5,001 pixels, more than 100,000,"),
        (10_000, "bomb"),
    ):
        write_header(tmp_path / "a.png", width=20_000, height=height)
        with pytest.raises(ValueError, match=f"a.png can't be read as an image: .*{sentence}"):
            read_image(tmp_path / "a.png")
