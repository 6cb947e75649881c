"""Explained images to files: overlays, exact arrays and a manifest that says how each was made. Overlays are drawn and
written by threads, beside the model's work. Equal input and settings give equal bytes: no times, no random numbers,
sorted order."""

import json
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from PIL import Image
from pydantic import BaseModel, ConfigDict

from vit.bundle import Bundle
from vit.explanation.render.explained import ExplainedImage, ExplainedMap, Settings
from vit.explanation.render.overlay import MAX_SIDE, draw_overlay, draw_sheet, relative_to_uniform
from vit.runtime.documents import check_schema, read_json
from vit.runtime.files import read_arrays, write_arrays, write_atomically, write_text

SCHEMA_VERSION = 3
ARRAYS_FILE, MANIFEST_FILE = "maps.npz", "manifest.json"
# of overlays, with what Pillow saves each by
PICTURES: dict[str, dict[str, Any]] = {"png": {}, "jpeg": {"quality": 85}, "webp": {"quality": 80}}
_LIBRARIES = ("vit-pipeline", "torch", "torchvision", "timm", "numpy", "Pillow", "matplotlib")
_SAVE_EVERY_SECONDS, _SAVING_FRACTION = 60.0, 0.05  # of the time, at most: each time all images so far are written
_MOST_WAITING_BATCHES = 2  # more would keep many photos in memory where drawing is slower than the model


class _Map(BaseModel):
    model_config = ConfigDict(extra="allow")
    map_key: str
    sanity_check: dict[str, Any] | None


class _Entry(BaseModel):
    model_config = ConfigDict(extra="allow")
    path: str
    name: str
    maps: list[_Map]


class _Manifest(BaseModel):
    parameters: dict[str, Any]
    model_sha256: str
    images: list[_Entry]


class MapWriter:
    """Writes explained images into the directory `output`, batch by batch: `NAME.METHOD.png` for the format png
    (or jpeg or webp; photos of at most `max_side` pixels, 0 for no limit), maps.npz for npz, and always manifest.json.

    A context manager. An interruption leaves a manifest of what was finished; with `resume` the next writer starts from
    it, or raises ValueError where it was made by another model, with other settings or by an older version."""

    def __init__(
        self,
        output: str | Path,
        bundle: Bundle,
        settings: Settings,
        *,
        formats: Collection[str] = ("png", "npz"),
        resume: bool = False,
        max_side: int = MAX_SIDE,
    ) -> None:
        self.output, self.bundle, self.settings, self.formats = Path(output), bundle, settings, formats
        pictures = [name for name in formats if name in PICTURES]
        if len(pictures) > 1:
            raise ValueError(f"overlays are written in one format, not {' and '.join(pictures)}; choose one of them")
        self._picture, self._max_side = pictures[0] if pictures else None, max_side
        self.entries: list[dict[str, Any]] = []  # of the manifest
        self.arrays: dict[str, np.ndarray] = {}
        self.unreadable: list[dict[str, str]] = []
        self._pool = ThreadPoolExecutor()
        self._writing: list[list[Future[None]]] = []
        self._last_saved, self._save_after = monotonic(), _SAVE_EVERY_SECONDS
        if resume and (self.output / MANIFEST_FILE).is_file():
            self._load()

    @property
    def paths(self) -> set[str]:
        """The images that are written."""
        return {entry["path"] for entry in self.entries}

    @property
    def names(self) -> set[str]:
        """The names that are taken."""
        return {entry["name"] for entry in self.entries}

    def __enter__(self) -> "MapWriter":
        self.output.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        with self._pool:
            if self.entries or self.unreadable:
                self._save()

    def add(self, explained: Sequence[ExplainedImage]) -> None:
        """Take a batch. Its overlays are written soon, the rest once a minute, of very many
        images less often, and at the end."""
        if self._picture:
            pool = self._pool
            self._writing.append([pool.submit(self._write_overlay, each, m) for each in explained for m in each.maps])
        for of_image in explained:
            self.entries.append(self._describe(of_image))
            self.arrays.update({found.key: found.values for found in of_image.maps})
        self._wait(_MOST_WAITING_BATCHES)
        if monotonic() - self._last_saved > self._save_after:
            self._save()

    def add_unreadable(self, path: str, reason: str) -> None:
        """Note an image that could not be read."""
        self.unreadable.append({"path": path, "reason": reason})

    def _load(self) -> None:
        manifest = read_json(self.output / MANIFEST_FILE)
        manifest = manifest if isinstance(manifest, dict) else {}
        if manifest.get("schema_version") != SCHEMA_VERSION:
            what = f"by another version of vit (schema {manifest.get('schema_version')}, not {SCHEMA_VERSION})"
            cure = "use --overwrite or another --output"
            raise ValueError(f"{self.output} was written {what} and cannot be continued; {cure}")
        check_schema(_Manifest, manifest, origin=str(self.output / MANIFEST_FILE))
        ours, theirs = self.settings.to_dict(), manifest["parameters"]
        changed = [key for key in ours if ours[key] != theirs.get(key)]
        if manifest["model_sha256"] != self.bundle.sha256:
            changed.append("the model")
        if changed:
            cure = "give the same, or another --output"
            raise ValueError(f"{self.output} was made with another choice of {', '.join(changed)}; {cure}")
        self.entries = manifest["images"]
        if (self.output / ARRAYS_FILE).is_file():
            self.arrays = read_arrays(self.output / ARRAYS_FILE)
        keys = {found["map_key"] for entry in self.entries for found in entry["maps"]}
        if "npz" in self.formats and not keys <= self.arrays.keys():
            raise ValueError(f"{self.output / ARRAYS_FILE} lacks maps of the manifest; use --overwrite")

    def _wait(self, most_waiting: int) -> None:
        while len(self._writing) > most_waiting:
            for future in self._writing.pop(0):
                future.result()

    def _save(self) -> None:
        self._wait(0)
        start = monotonic()
        self.entries.sort(key=lambda entry: entry["path"])
        if "npz" in self.formats:
            write_arrays(self.output / ARRAYS_FILE, dict(sorted(self.arrays.items())))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "method": ",".join(self.settings.methods),
            "parameters": self.settings.to_dict(),
            "model": self.bundle.name,
            "model_sha256": self.bundle.sha256,
            "run_id": self.bundle.metadata.get("run_id"),
            "preprocess": self.bundle.preprocess.to_dict(),
            "versions": {name: version(name) for name in _LIBRARIES},
            "images": self.entries,
            "unreadable": self.unreadable,
        }
        write_text(self.output / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
        self._last_saved = monotonic()
        self._save_after = max(_SAVE_EVERY_SECONDS, (self._last_saved - start) / _SAVING_FRACTION)

    def _describe(self, explained: ExplainedImage) -> dict[str, Any]:
        """An image's entry in the manifest. `map_key` and `overlay` are of its first map."""

        def describe_class(index: int) -> dict[str, Any]:
            probability = float(explained.probabilities[index])
            return {"index": index, "name": self.bundle.class_names[index], "probability": probability}

        maps = [
            {
                "method": found.method.name,
                "class_specific": found.method.class_specific,
                "target": None if found.target is None else describe_class(found.target),
                "logit": found.logit,
                "map_key": found.key,
                "overlay": f"{found.key}.{self._picture}" if self._picture else None,
                "prefix_mass": found.prefix_mass,
                "entropy": found.entropy,
                "sanity_check": None if found.sanity_check is None else found.sanity_check.to_dict(),
            }
            for found in explained.maps
        ]
        return {
            "path": explained.item.path,
            "name": explained.item.name,
            "sha256": explained.sha256,
            "size": list(explained.size),
            "box": list(explained.geometry.box),
            "predicted": describe_class(explained.predicted),
            "grid": list(explained.grid),
            "map_key": maps[0]["map_key"],
            "overlay": maps[0]["overlay"],
            "maps": maps,
        }

    def _write_overlay(self, explained: ExplainedImage, found: ExplainedMap) -> None:
        kind = self._picture
        assert kind is not None
        name = f"{found.key}.{kind}"
        picture = draw_map(explained, found, self.bundle.class_names, self._max_side)
        # the manifest, written after them, makes all their names sure
        write_atomically(self.output / name, lambda path: _save(picture, path, kind), flush_name=False)


def _save(picture: Image.Image, path: Path, kind: str) -> None:
    if kind != "png":
        picture.save(path, kind, **PICTURES[kind])
        return
    import cv2

    # by run lengths of the differences to the row above: photos hardly compress any further. Pillow, which tries five
    # kinds of differences for each row, takes 1.7 times as long for a file of 0.9 times the size
    options = [cv2.IMWRITE_PNG_COMPRESSION, 1, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_RLE]
    options += [cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_FILTER_UP]
    path.write_bytes(cv2.imencode(".png", np.asarray(picture)[:, :, ::-1], options)[1].tobytes())


def draw_map(
    explained: ExplainedImage, found: ExplainedMap, class_names: Sequence[str], max_side: int = MAX_SIDE
) -> Image.Image:
    """The picture of one map, or the contact sheet of several."""
    scale = found.scale
    assert scale is not None

    def describe_class(index: int) -> str:
        return f"{class_names[index]}  {100 * explained.probabilities[index]:.1f} %"

    caption = [f"predicted: {describe_class(explained.predicted)}"]
    if found.values.ndim == 4:
        layers, heads = found.values.shape[:2]
        return draw_sheet(
            found.values,
            layers=[f"layer {layer}" for layer in range(layers)] if layers > 1 else [""],
            heads=[f"head {head}" for head in range(heads)] if heads > 1 else ["mean"],
            scale=scale,
            caption=[*caption, found.method.title],
        )
    check = found.sanity_check
    shown = [f"{check.verdict}: {check.reason}"] if check and check.verdict != "supported" else []
    about = "does not depend on the class" if found.target is None else f"for {describe_class(found.target)}"
    with explained.open() as photo:
        return draw_overlay(
            photo,
            relative_to_uniform(found.values) if scale.relative else found.values,
            explained.geometry,
            scale=scale,
            caption=[*caption, f"{found.method.title}, {about}"],
            warnings=shown,
            max_side=max_side,
        )
