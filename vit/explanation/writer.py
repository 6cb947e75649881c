"""Write explained images: overlays, exact arrays, and a manifest that describes them.

Threads draw and write overlays while the model runs. Equal inputs and settings give equal bytes: no
times, no random numbers, sorted order.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from vit.bundle import Bundle
from vit.explanation.checks.sanity_checks import SanityCheck
from vit.explanation.records import (
    ImageResult,
    MapResult,
    Sink,
    build_row,
)
from vit.explanation.render.contact_sheet import MAX_SHEET_IMAGES, Tile, draw_contact_sheet
from vit.explanation.render.overlay import MAX_SIDE, draw_legend, draw_overlay, panel_size
from vit.explanation.render.text import MARGIN
from vit.runtime.arguments import check_choice
from vit.runtime.documents import check_schema, read_json
from vit.runtime.files import (
    expand_home,
    read_arrays,
    remove_temporaries,
    write_arrays,
    write_atomically,
    write_text,
)

SCHEMA_VERSION = 5
ARRAYS_FILE = "maps.npz"
MANIFEST_FILE = "manifest.json"
SHEET_FILE = "index.png"
PICTURE_FORMATS = ("png", "jpeg", "webp")
# vit/explanation/render/figure.py draws these; it imports matplotlib, which takes half a second
FIGURE_FORMATS = ("svg", "pdf")
OUTPUT_FORMATS = (*PICTURE_FORMATS, *FIGURE_FORMATS, "npz", "html")
_QUALITY = {"jpeg": 85, "webp": 80}
_LIBRARIES = ("vit-pipeline", "torch", "torchvision", "timm", "numpy", "Pillow", "matplotlib")
# each save writes all images so far, so for many images saves are limited to a fraction of the time
_SAVE_EVERY_SECONDS = 60.0
_MAX_SAVING_FRACTION = 0.05
# more would keep many photos in memory if drawing is slower than the model
_MAX_WAITING_BATCHES = 2


# pixels; pictures are drawn again with the sizes in the file
_Side = Annotated[int, Field(gt=0, strict=True)]


class _Part(BaseModel):
    """A part of the manifest. Other keys are kept."""

    model_config = ConfigDict(extra="allow")


class _Target(_Part):
    """A class or label, or a target of another kind, without index and probability."""

    index: int | None
    name: str
    probability: float | None


class _Predicted(_Target):
    """The prediction. With several labels an image, the first one's values and all labels."""

    labels: list[_Target] | None = None


class _Map(_Part):
    method: str
    class_specific: bool
    # null if the map is the same for every class
    target: _Target | None
    caption: str
    # the target's logit or value
    score: float | None
    # name of the array in maps.npz
    map_key: str
    # name of the picture
    overlay: str | None
    # fraction of the relevance in prefix tokens
    prefix_mass: float
    # nats
    entropy: float
    # the patch-removal test
    sanity_check: SanityCheck | None
    sinks: list[Sink]
    # fraction of the map on attention sinks
    sink_fraction: float
    completeness_error: float | None = None


class _Entry(_Part):
    path: str
    name: str
    title: str
    # hash of the file, or of the pixels of an image in memory
    sha256: str
    # width and height of the upright image
    size: tuple[_Side, _Side]
    # left, top, right, bottom of the part that the model sees, in its pixels
    box: tuple[float, float, float, float]
    predicted: _Predicted
    p_value: float | None = None
    # "unusual" or "unsure"
    note: str = ""
    # rows and columns of patches
    grid: tuple[int, int]
    map_key: str
    overlay: str | None
    maps: list[_Map]


class _Unreadable(_Part):
    path: str
    reason: str


class Manifest(_Part):
    """manifest.json of `vit explain`. `schema_version` rises when a key is removed or changes its
    meaning, not when a key is added."""

    schema_version: int
    # names of the methods, with commas
    method: str
    # everything that the maps depend on
    parameters: dict[str, Any]
    model: str
    model_sha256: str
    run_id: str | None
    preprocess: dict[str, Any]
    versions: dict[str, str]
    images: list[_Entry]
    unreadable: list[_Unreadable]


class MapWriter:
    """Writes explained images into a directory, batch by batch: overlays `NAME.METHOD.png`,
    maps.npz, and always manifest.json. With overlays, index.png shows the first of them.

    This is a context manager. After an interruption the manifest has the images that were finished.

    Args:
        output: The directory.
        bundle: The model.
        parameters: Everything that the maps depend on, for the manifest.
        formats: "png", "jpeg" or "webp" for overlays, "svg" and "pdf" for figures, "npz" for
            maps.npz. "html" is written elsewhere.
        smooth: Interpolate between patches.
        max_side: Largest side of a photo in overlays and figures, in pixels; 0 for no limit.
        dpi: Pixels of a photo per inch of a figure.
        captions: Write text below the pictures. Otherwise the colours of an overlay are in a file
            of their own, NAME.METHOD.colours.png.
        resume: Start from the manifest of an interrupted export.

    Raises:
        ValueError: A format is unknown, there are several formats for overlays, or `resume` finds
            an export by another model, with other parameters or by another version.
    """

    def __init__(
        self,
        output: str | Path,
        bundle: Bundle,
        parameters: Mapping[str, Any],
        *,
        formats: Sequence[str] = ("png", "npz"),
        smooth: bool = True,
        max_side: int = MAX_SIDE,
        dpi: int = 300,
        captions: bool = True,
        resume: bool = False,
    ) -> None:
        for name in formats:
            check_choice(name, OUTPUT_FORMATS, name="--format")
        pictures = [name for name in formats if name in PICTURE_FORMATS]
        if len(pictures) > 1:
            choices = " and ".join(pictures)
            raise ValueError(
                f"overlays are written in one format, not {choices}; choose one of them"
            )
        self.output = expand_home(output)
        self.bundle = bundle
        self.parameters = parameters
        self.entries: list[dict[str, Any]] = []  # entries of the manifest
        self.arrays: dict[str, np.ndarray] = {}
        # path and reason for each image that could not be read
        self.unreadable: list[tuple[str, str]] = []
        self._picture_format = pictures[0] if pictures else None
        self._figure_formats = [name for name in formats if name in FIGURE_FORMATS]
        self._has_arrays = "npz" in formats
        self._smooth = smooth
        self._max_side = max_side
        self._dpi = dpi
        self._captions = captions
        self._pool = ThreadPoolExecutor()
        self._writing: list[list[Future[None]]] = []  # overlays of each batch
        self._last_saved = monotonic()
        self._save_after = _SAVE_EVERY_SECONDS
        # without a manifest nothing was finished
        if resume and (self.output / MANIFEST_FILE).is_file():
            self._load()

    @property
    def names(self) -> dict[str, str]:
        """Names of the images that are written, by their paths."""
        return {entry["path"]: entry["name"] for entry in self.entries}

    def __enter__(self) -> "MapWriter":
        self.output.mkdir(parents=True, exist_ok=True)
        remove_temporaries(self.output)
        return self

    def __exit__(self, *error: object) -> None:
        # also after an interruption, so that it can be continued
        with self._pool:
            if self.entries or self.unreadable:
                self._save()
                if self.entries and self._picture_format:
                    self._write_sheet()

    def add(self, images: Sequence[ImageResult]) -> None:
        """Add a batch. Its overlays are written soon, the other files once a minute (less often for
        very many images) and at the end."""
        maps = [(image, result) for image in images for result in image.maps]
        drawing: list[Future[None]] = []
        if self._picture_format:
            drawing += [self._pool.submit(self._write_overlay, *each) for each in maps]
        if self._figure_formats:
            drawing += [self._pool.submit(self._write_figures, *each) for each in maps]
        self._writing.append(drawing)
        for image in images:
            self.entries.append(
                image.describe(self.bundle.class_names, picture_format=self._picture_format)
            )
            for result in image.maps:
                self.arrays[result.key] = result.values
        # if drawing is slower than the model, the model waits
        self._wait(_MAX_WAITING_BATCHES)
        if monotonic() - self._last_saved > self._save_after:
            self._save()

    def _load(self) -> None:
        path = self.output / MANIFEST_FILE
        manifest = read_json(path)
        schema = manifest.get("schema_version") if isinstance(manifest, dict) else None
        if schema != SCHEMA_VERSION:
            raise ValueError(
                f"{self.output} was written by another version of vit (schema {schema}, not "
                f"{SCHEMA_VERSION}) and cannot be continued; use --overwrite or another --output"
            )
        check_schema(Manifest, manifest, origin=str(path))

        # maps with different parameters must not be in one directory
        changed = [
            key
            for key, value in self.parameters.items()
            if value != manifest["parameters"].get(key)
        ]
        if manifest["model_sha256"] != self.bundle.sha256:
            changed.append("the model")
        if changed:
            raise ValueError(
                f"{self.output} was made with another choice of {', '.join(changed)}; give the "
                "same, or another --output"
            )

        self.entries = manifest["images"]
        arrays_path = self.output / ARRAYS_FILE
        if arrays_path.is_file():
            self.arrays = read_arrays(arrays_path)
        keys = {result["map_key"] for entry in self.entries for result in entry["maps"]}
        if self._has_arrays and not keys <= self.arrays.keys():
            raise ValueError(f"{arrays_path} lacks maps of the manifest; use --overwrite")
        # the contact sheet is cut out of the overlays
        kinds = [*self._figure_formats]
        if self._picture_format:
            kinds.append(self._picture_format)
        if not all((self.output / f"{key}.{kind}").is_file() for key in keys for kind in kinds):
            raise ValueError(
                f"{self.output} lacks overlays of the images in its manifest; use --overwrite"
            )

    def _wait(self, max_waiting: int) -> None:
        """Wait until the overlays of at most `max_waiting` batches are not written yet."""
        while len(self._writing) > max_waiting:
            for future in self._writing.pop(0):
                future.result()

    def _save(self) -> None:
        self._wait(0)
        start = monotonic()
        # so that a continued export has the same bytes as an uninterrupted one
        self.entries.sort(key=lambda entry: entry["path"])
        if self._has_arrays:
            write_arrays(self.output / ARRAYS_FILE, dict(sorted(self.arrays.items())))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "method": ",".join(self.parameters["methods"]),
            "parameters": self.parameters,
            "model": self.bundle.name,
            "model_sha256": self.bundle.sha256,
            "run_id": self.bundle.metadata.get("run_id"),
            "preprocess": self.bundle.preprocess.to_dict(),
            "versions": {name: version(name) for name in _LIBRARIES},
            "images": self.entries,
            "unreadable": [{"path": path, "reason": reason} for path, reason in self.unreadable],
        }
        write_text(self.output / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
        self._last_saved = monotonic()
        seconds = self._last_saved - start
        # for many images, saving must not take longer than explaining
        self._save_after = max(_SAVE_EVERY_SECONDS, seconds / _MAX_SAVING_FRACTION)

    def _write_sheet(self) -> None:
        # decoded by several threads
        rows = list(self._pool.map(self._read_row, self.entries[:MAX_SHEET_IMAGES]))
        sheet = draw_contact_sheet(rows)
        write_atomically(self.output / SHEET_FILE, partial(_save_picture, sheet, kind="png"))

    def _read_row(self, entry: dict[str, Any]) -> list[Tile]:
        """Cut an image and its maps out of the overlays, which after `resume` include those of an
        earlier call."""
        original_width, original_height = entry["size"]
        width, height = panel_size((original_width, original_height), self._max_side)
        pictures = []
        for result in entry["maps"]:
            with Image.open(self.output / result["overlay"]) as overlay:
                # the photo is on the left, the map on the right; without captions nothing is around
                margin = 0 if overlay.width == 2 * width + MARGIN else MARGIN
                photo, picture = (
                    overlay.crop((left, margin, left + width, margin + height))
                    for left in (margin, margin + width + MARGIN)
                )
            pictures.append(picture)
        return build_row(entry, photo, pictures)

    def _write_overlay(self, image: ImageResult, result: MapResult) -> None:
        kind = self._picture_format
        assert kind is not None
        picture = draw_map(
            image,
            result,
            self.bundle.class_names,
            smooth=self._smooth,
            max_side=self._max_side,
            caption=self._captions,
        )
        pictures = {result.key: picture}
        if not self._captions:
            assert result.scale is not None
            legend = draw_legend(result.shown_values, result.scale, picture.width)
            pictures[f"{result.key}.colours"] = legend
        for name, each in pictures.items():
            # the manifest is written later, and makes all their names durable
            save = partial(_save_picture, each, kind=kind)
            write_atomically(self.output / f"{name}.{kind}", save, flush_name=False)

    def _write_figures(self, image: ImageResult, result: MapResult) -> None:
        from vit.explanation.render.figure import save_figure

        assert result.scale is not None
        caption = []
        if self._captions:
            caption = _describe_map(image, result, self.bundle.class_names)
        for kind in self._figure_formats:
            save = partial(
                save_figure,
                image=image.read_image(),
                values=result.shown_values,
                geometry=image.geometry,
                kind=kind,
                scale=result.scale,
                caption=caption,
                smooth=self._smooth,
                max_side=self._max_side,
                dpi=self._dpi,
            )
            write_atomically(self.output / f"{result.key}.{kind}", save, flush_name=False)


def draw_map(
    image: ImageResult,
    result: MapResult,
    class_names: Sequence[str],
    *,
    smooth: bool = True,
    max_side: int = MAX_SIDE,
    caption: bool = True,
) -> Image.Image:
    """Draw one map beside its photo.

    Args:
        image: The explained image.
        result: One of its maps.
        class_names: Names of the classes.
        smooth: Interpolate between patches.
        max_side: Largest side of the photo in pixels; 0 for no limit.
        caption: Write what it shows and the colours below.
    """
    assert result.scale is not None
    return draw_overlay(
        image.read_image(),
        result.shown_values,
        image.geometry,
        scale=result.scale,
        caption=_describe_map(image, result, class_names) if caption else None,
        smooth=smooth,
        max_side=max_side,
    )


def _describe_map(image: ImageResult, result: MapResult, class_names: Sequence[str]) -> list[str]:
    """Return the lines of a map's caption: the prediction first, then the map's own."""
    lines = [
        f"{image.item.title}: {image.describe_prediction(class_names)}",
        result.describe(),
    ]
    if result.target_name is not None:
        lines[-1] += f" ({result.method.title})"
    if result.sanity_check is not None:
        lines.append(f"patch-removal test: {result.sanity_check}")
    if result.sinks:
        lines.append(result.describe_sinks())
    return lines


def _save_picture(picture: Image.Image, path: Path, kind: str) -> None:
    if kind != "png":
        picture.save(path, kind, quality=_QUALITY[kind])
        return
    import cv2  # takes a tenth of a second

    # run lengths of the differences from the row above. Pillow, which tries five kinds of
    # differences for each row, takes 1.7 times as long for a file of 0.9 times the size
    options = [
        cv2.IMWRITE_PNG_COMPRESSION,
        1,
        cv2.IMWRITE_PNG_STRATEGY,
        cv2.IMWRITE_PNG_STRATEGY_RLE,
        cv2.IMWRITE_PNG_FILTER,
        cv2.IMWRITE_PNG_FILTER_UP,
    ]
    _, encoded = cv2.imencode(".png", cv2.cvtColor(np.asarray(picture), cv2.COLOR_RGB2BGR), options)
    path.write_bytes(encoded.tobytes())
