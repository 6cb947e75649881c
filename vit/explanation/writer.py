"""Write explained images: overlays, exact arrays, the gallery, and a manifest that describes them.

Equal inputs and settings give equal bytes: no times, no random numbers.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from vit.data.dataset import printable
from vit.explanation.gallery.gallery import write_gallery
from vit.explanation.records import Explanations, ImageResult
from vit.explanation.render.overlay import blend
from vit.runtime.files import format_json, write_arrays, write_atomically
from vit.runtime.version import collect_versions

SHEET_FILE = "index.png"
FORMATS = ("png", "svg", "pdf", "npz", "html")


def write_pictures(folder: Path, images: Sequence[ImageResult], formats: Sequence[str]) -> None:
    """Write the pictures of some images, `NAME.METHOD.png` and the like: maps over their photos
    ("png") and figures ("svg", "pdf")."""
    for image in images:
        assert image.photo is not None
        for result in image.maps:
            if "png" in formats:
                signed = result.method.signed
                picture = blend(image.photo, result.values, image.geometry, signed=signed)
                _write_picture(folder / f"{result.key}.png", picture)
            for kind in {"svg", "pdf"} & set(formats):
                from vit.explanation.render.figure import save_figure  # takes half a second

                save_figure(folder / f"{result.key}.{kind}", image, result)


def write_results(
    folder: Path,
    found: Explanations,
    formats: Sequence[str],
    *,
    parameters: Mapping[str, Any],
    cards: Sequence[Mapping[str, Any]],
) -> None:
    """Write the files of all images: the manifest with `parameters`, index.png, maps.npz, and the
    gallery of `cards` from `describe_card`."""
    if "npz" in formats:
        arrays = {result.key: result.values for image in found.images for result in image.maps}
        write_arrays(folder / "maps.npz", arrays)
    if "png" in formats:
        _write_picture(folder / SHEET_FILE, found.draw_sheet())
    bundle = found.bundle
    entries = [image.to_dict() for image in found.images]
    manifest = {
        "schema_version": 8,
        "parameters": parameters,
        "model": bundle.name,
        "model_sha256": bundle.sha256,
        "run_id": bundle.metadata.get("run_id"),
        "preprocess": bundle.preprocess.to_dict(),
        "versions": collect_versions(),
        "images": entries,
        "unreadable": [
            {"path": printable(path), "reason": printable(reason)}
            for path, reason in found.unreadable
        ],
    }
    write_atomically(folder / "manifest.json", format_json(manifest))
    if "html" in formats:
        write_gallery(folder / "gallery.html", bundle, cards, num_images=len(entries))


def _write_picture(path: Path, picture: Image.Image) -> None:
    # the lowest compression takes a fifth of the time for a file of 1.2 times the size
    write_atomically(path, partial(picture.save, format="png", compress_level=1))
