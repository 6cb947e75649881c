"""A data source of another package: images of stripes, horizontal or vertical."""

from pathlib import Path

import numpy as np
from PIL import Image

import vit
from vit.data.dataset import ImageDataset, Request, SourceSplits
from vit.data.sources.base import FileReader


def write_images(root: Path, count: int = 24) -> None:
    """Write such images, and the file by which their folder is recognised."""
    root.mkdir()
    (root / "stripes.txt").write_text("16 pixels\n")
    for number in range(count):
        pixels = np.zeros((16, 16, 3), dtype=np.uint8)
        pixels[number % 3 :: 4] = 255
        if number % 2:
            pixels = pixels.transpose(1, 0, 2)
        Image.fromarray(pixels).save(root / f"{'hv'[number % 2]}{number:02d}.png")


def find_stripes(request: Request) -> SourceSplits:
    """The images below a root whose names begin with h or v."""
    root = Path(request.root or ".")
    paths = sorted(path.name for path in root.glob("*.png"))

    def load(split: str) -> ImageDataset:
        labels = np.array([path.startswith("v") for path in paths], dtype=np.int64)
        dataset = ImageDataset(
            name="stripes",
            class_names=("horizontal", "vertical"),
            labels=labels,
            ids=paths,
            reader=FileReader(root, paths),
        )
        return dataset.keep_classes(request.classes)

    return SourceSplits({"train": "the stripes"}, load)


def has_stripes(place: str) -> bool:
    """A folder with the file that names them."""
    return (Path(place) / "stripes.txt").is_file()


SOURCE = vit.Source("stripes", find_stripes, recognizes=has_stripes, needs_root=True, unit="files")
BROKEN = "not a source"
