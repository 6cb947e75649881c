"""Write explained images: overlays, exact arrays, the gallery, and a manifest that describes them.

Equal inputs and settings give equal bytes: no times, no random numbers, sorted order.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.bundle import Bundle
from vit.explanation.gallery.gallery import MAX_IMAGES, describe_card, write_gallery
from vit.explanation.records import MAX_SHEET_IMAGES, ImageResult, MapResult
from vit.explanation.render.overlay import draw_overlay
from vit.runtime.arguments import check_choice
from vit.runtime.files import (
    check_output,
    expand_home,
    format_json,
    open_output,
    write_arrays,
    write_atomically,
)
from vit.runtime.version import collect_versions

SCHEMA_VERSION = 7
SHEET_FILE = "index.png"
_FORMATS = ("png", "svg", "pdf", "npz", "html")


class MapWriter:
    """Writes explained images into a directory: pictures `NAME.METHOD.png` of each batch, and at
    the end the other files.

    Args:
        output: The directory.
        bundle: The model.
        parameters: Everything that the maps depend on, for the manifest.
        formats: "png" for overlays and index.png of the first images, "svg" and "pdf" for figures,
            "npz" for maps.npz, "html" for the gallery.
        overwrite: Replace an earlier result.

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
        self._place = expand_home(output)
        self._overwrite = overwrite
        check_output(self._place, overwrite=overwrite)
        self._bundle = bundle
        self._parameters = parameters
        self._formats = formats
        self._entries: list[dict[str, Any]] = []  # images as the manifest describes them
        self._arrays: dict[str, np.ndarray] = {}
        self._shown: list[ImageResult] = []  # images of the contact sheet
        self._cards: list[dict[str, Any]] = []  # images of the gallery

    def add(self, images: Sequence[ImageResult]) -> None:
        """Add a batch, and write its pictures."""
        if not self._entries:
            # not earlier, so that a command that can read no image leaves nothing
            open_output(self._place, overwrite=self._overwrite)
        # Pillow draws and compresses outside of Python's lock
        maps = [(image, result) for image in images for result in image.maps]
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._draw, maps))
        self._entries += map(_describe_image, images)
        self._arrays |= {result.key: result.values for _, result in maps}
        if "png" in self._formats:
            self._shown += images[: MAX_SHEET_IMAGES - len(self._shown)]
        if "html" in self._formats:
            self._cards += map(describe_card, images[: MAX_IMAGES - len(self._cards)])

    def finish(self, unreadable: Sequence[tuple[str, str]]) -> None:
        """Write the files of all images.

        Args:
            unreadable: Path and reason for each image that could not be read.
        """
        if "npz" in self._formats:
            write_arrays(self._place / "maps.npz", dict(sorted(self._arrays.items())))
        if self._shown:
            from vit.explanation.render.figure import draw_sheet  # matplotlib takes half a second

            _write_picture(self._place / SHEET_FILE, draw_sheet(self._shown))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "parameters": self._parameters,
            "model": self._bundle.name,
            "model_sha256": self._bundle.sha256,
            "run_id": self._bundle.metadata.get("run_id"),
            "preprocess": self._bundle.preprocess.to_dict(),
            "versions": collect_versions(),
            "images": sorted(self._entries, key=lambda entry: entry["path"]),
            "unreadable": [{"path": path, "reason": reason} for path, reason in unreadable],
        }
        write_atomically(self._place / "manifest.json", format_json(manifest))
        if "html" in self._formats:
            path = self._place / "gallery.html"
            write_gallery(path, self._bundle, self._cards, images=self._entries)

    def _draw(self, pair: tuple[ImageResult, MapResult]) -> None:
        """Write the pictures of one map."""
        image, result = pair
        assert image.photo is not None
        if "png" in self._formats:
            picture = draw_overlay(
                image.photo, result.values, image.geometry, signed=result.method.signed
            )
            _write_picture(self._place / f"{result.key}.png", picture)
        for kind in {"svg", "pdf"} & set(self._formats):
            from vit.explanation.render.figure import save_figure  # see `finish`

            save_figure(self._place / f"{result.key}.{kind}", image, result)


def _describe_image(image: ImageResult) -> dict[str, Any]:
    """Describe an image for the manifest."""
    maps = []
    for result in image.maps:
        target = None
        if result.target_name is not None:
            target = image.describe_class(result.target, result.target_name)
        maps.append(
            {
                "method": result.method.name,
                "target": target,
                "caption": result.caption,
                "score": result.score,
                "map_key": result.key,
                "sanity_check": result.sanity_check and asdict(result.sanity_check),
            }
        )
    return {
        "path": image.path,
        "name": image.name,
        "size": list(image.geometry.original_size),
        "box": list(image.geometry.box),
        "predicted": image.prediction,
        "maps": maps,
    }


def _write_picture(path: Path, picture: Image.Image) -> None:
    # the lowest compression takes a fifth of the time for a file of 1.2 times the size
    write_atomically(path, partial(picture.save, format="png", compress_level=1))
