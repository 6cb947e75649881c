"""The largest images take at most 10 bytes a pixel, whatever their shape; longer ones than JPEG knows
are refused."""

from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Launcher
from vit.data.images import check_size, read_image


@pytest.mark.parametrize("size", [(1, 65_536), (65_536, 1)])
def test_a_line_of_pixels_is_refused(size: tuple[int, int], tmp_path: Path) -> None:
    Image.new("P", size).save(tmp_path / "line.png")
    with pytest.raises(
        ValueError, match=r"pixels, more than .* 65,535 a side; reduce or divide it"
    ):
        read_image(tmp_path / "line.png")
    check_size((65_535, 1500))


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path) -> None:
    for height, sentence in (
        (5_001, "20,000 x 5,001 pixels, more than 100,000,"),
        (10_000, "bomb"),
    ):
        Image.new("1", (20_000, height)).save(tmp_path / "a.png")
        with pytest.raises(ValueError, match=f"a.png can't be read as an image: .*{sentence}"):
            read_image(tmp_path / "a.png")


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["1", "P", "RGBA", "I;16"])
def test_the_longest_images_take_ten_bytes_a_pixel(
    cli: Launcher, mode: str, tmp_path: Path
) -> None:
    size = (1500, 65_535)
    Image.new(mode, size).save(tmp_path / "long.png", compress_level=1)
    code = (
        "import re, sys; from pathlib import Path; from vit.data.images import read_image;"
        "status = Path('/proc/self/status');"
        "peak = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', status.read_text())[1]) * 1024;"
        "before = peak(); image = read_image(Path(sys.argv[1])); print(peak() - before)"
    )
    out = cli.finish(cli.start(tmp_path / "long.png", program=("-c", code))).out
    assert int(out) < 10 * size[0] * size[1]
