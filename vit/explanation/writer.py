"""Write explained images: overlays, exact arrays, a manifest that describes them, and the gallery.

Equal inputs and settings give equal bytes: no times, no random numbers.

The gallery is one HTML file. A map is a picture of one pixel for each patch, which the browser
stretches over the photo. Layers and heads, and the rows of the rollout, are tiles of one picture
each.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.explanation.patch_removal import count_confirmed
from vit.explanation.records import Explanations, ImageResult, MapResult
from vit.explanation.render.overlay import blend, palette, resize_picture, shade
from vit.explanation.render.page import BADGES, encode_picture, name_model, render_page
from vit.runtime.files import format_json, write_arrays, write_atomically
from vit.runtime.version import collect_versions

SHEET_FILE = "index.png"
FORMATS = ("png", "svg", "pdf", "npz", "html")
MAX_IMAGES = 200  # browsers can't open much larger pages
_PHOTO_SIDE = 400  # pixels
_OPACITY = 220  # opacity of the strongest attention, of 255
_PAGE = Path(__file__).parent / "render" / "gallery.html.jinja"


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
        _write_gallery(folder / "gallery.html", bundle, cards, num_images=len(entries))


def _write_gallery(
    path: Path, bundle: Bundle, cards: Sequence[Mapping[str, Any]], *, num_images: int
) -> None:
    """Write the page of the first of `num_images` images, see `describe_card`."""
    maps = [each for card in cards for each in card["maps"]]
    targets = [each["target"] for each in maps if each["target"]]
    classes = {each["index"]: each["name"] for each in targets if each["index"] is not None}
    context = {
        "title": f"Attention maps of {name_model(bundle.name)}",
        "images": cards,
        "num_images": num_images,
        "methods": dict.fromkeys(each["method"] for each in maps),
        "classes": dict(sorted(classes.items())),
        "noun": "label" if bundle.is_multilabel else "class",
        "badges": BADGES,
        "summary": count_confirmed(cards),
    }
    write_atomically(path, render_page(_PAGE, context))


def describe_card(image: ImageResult) -> dict[str, Any]:
    """Describe an image for the page: as the manifest has it, with its pictures."""
    assert image.photo is not None
    # small ones are not enlarged
    photo = resize_picture(image.photo, min_side=1, max_side=_PHOTO_SIDE)
    attention = image.attention or {}
    return image.to_dict() | {
        "said": image.describe_prediction(),
        "photo": encode_picture(photo),
        "grid": image.maps[0].values.shape,
        "map_pictures": [_draw_map(result) for result in image.maps],
        "pictures": {name: _encode_tiles(tiles) for name, tiles in attention.items()},
    }


def _draw_map(result: MapResult) -> str:
    """Draw a map in the colours of the overlays, with the opacity in the fourth channel."""
    rows, columns = result.values.shape
    heat, strength = shade(result.values, (columns, rows), signed=result.method.signed)
    heat.putalpha(Image.fromarray((255 * strength).round().astype(np.uint8)))
    return encode_picture(heat, "PNG")


def _encode_tiles(tiles: Float[np.ndarray, "down across rows columns"]) -> str:
    """Encode maps as tiles of one picture; the colours of each go from 0 to its largest value."""
    largest = np.maximum(tiles.max(axis=(2, 3), keepdims=True), 1e-30)
    cells = np.round(255 * tiles / largest).astype(np.uint8)
    down, across, rows, columns = tiles.shape
    picture = Image.fromarray(cells.swapaxes(1, 2).reshape(down * rows, across * columns))
    picture.putpalette(palette(signed=False).tobytes())
    # low values show the photo
    picture.info["transparency"] = np.linspace(0, _OPACITY, 256).astype(np.uint8).tobytes()
    return encode_picture(picture, "PNG")


def _write_picture(path: Path, picture: Image.Image) -> None:
    # the lowest compression takes a fifth of the time for a file of 1.2 times the size
    write_atomically(path, partial(picture.save, format="png", compress_level=1))
