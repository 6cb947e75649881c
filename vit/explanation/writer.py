"""Write explained images: overlays, exact arrays, and a manifest that describes them.

Threads draw and write overlays while the model runs. Equal inputs and settings give equal bytes: no
times, no random numbers, sorted order.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.bundle import Bundle
from vit.explanation.records import ImageResult, MapResult
from vit.explanation.render.overlay import draw_overlay
from vit.runtime.arguments import check_choice
from vit.runtime.files import open_output, write_arrays, write_atomically, write_json

SCHEMA_VERSION = 6
SHEET_FILE = "index.png"
# vit/explanation/render/figure.py draws these; it imports matplotlib, which takes half a second
_FIGURE_FORMATS = ("svg", "pdf")
_FORMATS = ("png", *_FIGURE_FORMATS, "npz", "html")
_LIBRARIES = ("vit-pipeline", "torch", "torchvision", "timm", "numpy", "Pillow", "matplotlib")
# more would keep many photos in memory if drawing is slower than the model
_MAX_WAITING_BATCHES = 2


class MapWriter:
    """Writes explained images into a directory: overlays `NAME.METHOD.png` as soon as their batch
    is added, and at the end the other files.

    Args:
        output: The directory.
        bundle: The model.
        parameters: Everything that the maps depend on, for the manifest.
        formats: "png" for overlays and index.png of the first images, "svg" and "pdf" for figures,
            "npz" for maps.npz. "html" is written elsewhere.
        overwrite: Replace an earlier result.

    Attributes:
        output: The directory.
        entries: The images as the manifest describes them.

    Raises:
        ValueError: A format is unknown.
        FileExistsError: The directory contains files.
    """

    def __init__(
        self,
        output: str | Path,
        bundle: Bundle,
        parameters: Mapping[str, Any],
        *,
        formats: Sequence[str],
        overwrite: bool,
    ) -> None:
        for name in formats:
            check_choice(name, _FORMATS, name="--format")
        self.output = open_output(output, overwrite=overwrite)
        self._bundle = bundle
        self._parameters = parameters
        self._formats = formats
        self.entries: list[dict[str, Any]] = []
        self._arrays: dict[str, np.ndarray] = {}
        self._rows: list[list[Any]] = []  # images of the contact sheet
        self._pool = ThreadPoolExecutor()
        self._writing: list[list[Future[None]]] = []  # pictures of each batch

    def add(self, images: Sequence[ImageResult]) -> None:
        """Add a batch."""
        has_overlays = "png" in self._formats
        maps = [(image, result) for image in images for result in image.maps]
        self._writing.append([self._pool.submit(self._draw, *each) for each in maps])
        self.entries += [image.describe(has_overlays=has_overlays) for image in images]
        self._arrays |= {result.key: result.values for _, result in maps}
        if has_overlays:
            from vit.explanation.render.figure import MAX_SHEET_IMAGES

            shown = images[: MAX_SHEET_IMAGES - len(self._rows)]
            self._rows += [image.draw_row() for image in shown]
        # if drawing is slower than the model, the model waits
        self._wait(_MAX_WAITING_BATCHES)

    def finish(self, unreadable: Sequence[tuple[str, str]]) -> None:
        """Write the files of all images.

        Args:
            unreadable: Path and reason for each image that could not be read.
        """
        with self._pool:
            self._wait(0)
        if "npz" in self._formats:
            write_arrays(self.output / "maps.npz", dict(sorted(self._arrays.items())))
        if self._rows:
            from vit.explanation.render.figure import draw_sheet

            save = partial(_save_picture, draw_sheet(self._rows))
            write_atomically(self.output / SHEET_FILE, save)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "parameters": self._parameters,
            "model": self._bundle.name,
            "model_sha256": self._bundle.sha256,
            "run_id": self._bundle.metadata.get("run_id"),
            "preprocess": self._bundle.preprocess.to_dict(),
            "versions": {name: version(name) for name in _LIBRARIES},
            "images": sorted(self.entries, key=lambda entry: entry["path"]),
            "unreadable": [{"path": path, "reason": reason} for path, reason in unreadable],
        }
        write_json(self.output / "manifest.json", manifest)

    def _wait(self, max_waiting: int) -> None:
        """Wait until the pictures of at most `max_waiting` batches are not written yet."""
        while len(self._writing) > max_waiting:
            for future in self._writing.pop(0):
                future.result()

    def _draw(self, image: ImageResult, result: MapResult) -> None:
        """Write the pictures of one map."""
        for kind in self._formats:
            if kind == "png":
                save = partial(_save_picture, draw_map(image, result))
            elif kind in _FIGURE_FORMATS:
                from vit.explanation.render.figure import save_figure

                save = partial(
                    save_figure,
                    image=image.read_image(),
                    values=result.shown_values,
                    geometry=image.geometry,
                    kind=kind,
                    scale=result.scale,
                    caption=image.caption(result),
                )
            else:
                continue
            write_atomically(self.output / f"{result.key}.{kind}", save)


def draw_map(image: ImageResult, result: MapResult) -> Image.Image:
    """Draw one map beside its photo."""
    return draw_overlay(image.read_image(), result.shown_values, image.geometry, scale=result.scale)


def _save_picture(picture: Image.Image, path: Path) -> None:
    # the lowest compression takes a fifth of the time for a file of 1.2 times the size
    picture.save(path, "png", compress_level=1)
