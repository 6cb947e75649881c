"""Explained images to files: overlays, exact arrays and a manifest that says how each was made.

Overlays are drawn and written by the threads that also decode, beside the model's work. Equal input and
settings give equal bytes: no times, no random numbers, sorted order.
"""

import io
import json
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from PIL import Image

from vit.explanation.explain import ExplainedImage, ExplainedMap, Settings, explain_items
from vit.explanation.items import ImageItem
from vit.explanation.methods.table import Explainable
from vit.explanation.render.overlay import as_even_shares, draw_overlay, draw_sheet
from vit.runtime.files import write_atomically, write_text

SCHEMA_VERSION = 1
ARRAYS_FILE, MANIFEST_FILE = "maps.npz", "manifest.json"
_LIBRARIES = ("vit-pipeline", "torch", "torchvision", "timm", "numpy", "Pillow", "matplotlib")
_SAVE_EVERY_SECONDS = 60.0
_BATCHES_IN_WRITING = 2  # more would pile photos up in memory where drawing is the slower part


@dataclass
class Results:
    """What is known so far: manifest entries, arrays by key, and what could not be read."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    unreadable: list[dict[str, str]] = field(default_factory=list)

    @property
    def paths(self) -> set[str]:
        return {entry["path"] for entry in self.entries}

    @property
    def names(self) -> set[str]:
        return {entry["name"] for entry in self.entries}


def export_maps(
    bundle: Explainable,
    items: Sequence[ImageItem],
    output: Path,
    settings: Settings,
    *,
    pictures: bool = True,
    arrays: bool = True,
    done: Results | None = None,
    row_budget: int = 0,
    on_batch: Callable[[list[ExplainedImage]], object] = lambda explained: None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Results:
    """Explain `items` and write `NAME.METHOD.png`, maps.npz and manifest.json into `output`, which exists.

    `done` is what an interrupted export left (`load_results`), to be continued. `on_batch` sees every batch
    of explained images, for other formats. An interruption leaves a manifest of what was finished.
    """
    results, last_saved = done or Results(), monotonic()
    size = settings.batch_size

    def save() -> None:
        for future in [future for of_batch in writing for future in of_batch]:
            future.result()
        writing.clear()
        _save(output, bundle, settings, results, arrays=arrays)

    def note_unreadable(item: ImageItem, reason: str) -> None:
        results.unreadable.append({"path": item.path, "reason": reason})

    with ThreadPoolExecutor() as pool:
        writing: list[list[Future[None]]] = []
        try:
            batches = explain_items(
                bundle, items, settings, pool=pool, on_unreadable=note_unreadable, row_budget=row_budget
            )
            for number, explained in enumerate(batches):
                on_batch(explained)
                writing.append(
                    [pool.submit(_write_overlay, output, of_image, found, bundle.class_names)
                     for of_image in explained for found in of_image.maps if pictures]
                )  # fmt: skip
                for of_image in explained:
                    results.entries.append(_describe(of_image, bundle.class_names, pictures=pictures))
                    results.arrays.update({found.key: found.values for found in of_image.maps})
                on_progress(min(size, len(items) - number * size))
                while len(writing) > _BATCHES_IN_WRITING:
                    for future in writing.pop(0):
                        future.result()
                if monotonic() - last_saved > _SAVE_EVERY_SECONDS:
                    save()
                    last_saved = monotonic()
        finally:
            if results.entries or results.unreadable:
                save()
    return results


def load_results(output: Path, bundle: Explainable, settings: Settings) -> Results:
    """What an interrupted export left in `output`; nothing where there is no manifest.

    Raises ValueError where it was made by another model or with other settings.
    """
    path = output / MANIFEST_FILE
    if not path.is_file():
        return Results()
    manifest = json.loads(path.read_text(encoding="utf-8"))
    parameters, theirs = _parameters(settings), manifest.get("parameters", {})
    changed = [key for key in parameters if parameters[key] != theirs.get(key)]
    if manifest.get("model_sha256") != getattr(bundle, "sha256", None):
        changed.append("the model")
    if changed:
        raise ValueError(
            f"{output} was made with another choice of {', '.join(changed)}; "
            "give the same, or another --output"
        )
    arrays: dict[str, np.ndarray] = {}
    if (output / ARRAYS_FILE).is_file():
        with np.load(output / ARRAYS_FILE, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
    return Results(entries=manifest["images"], arrays=arrays)


def _save(output: Path, bundle: Explainable, settings: Settings, results: Results, *, arrays: bool) -> None:
    """Write what is known, in the order of the paths."""
    results.entries.sort(key=lambda entry: entry["path"])
    if arrays:
        ordered = {key: results.arrays[key] for key in sorted(results.arrays)}
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **ordered)
        write_atomically(output / ARRAYS_FILE, lambda temporary: _write_bytes(temporary, content.getvalue()))
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "method": ",".join(settings.methods),
        "parameters": _parameters(settings),
        "model": getattr(bundle, "name", type(bundle.model).__name__),
        "model_sha256": getattr(bundle, "sha256", None),
        "preprocess": bundle.preprocess.to_dict(),
        "versions": {name: version(name) for name in _LIBRARIES},
        "images": results.entries,
        "unreadable": results.unreadable,
    }
    write_text(output / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _parameters(settings: Settings) -> dict[str, Any]:
    values = asdict(settings)
    return {**values.pop("maps"), **values, "methods": list(settings.methods)}


def _describe(explained: ExplainedImage, class_names: Sequence[str], *, pictures: bool) -> dict[str, Any]:
    """An image's entry in the manifest. `map_key` and `overlay` are of its first map."""
    maps = [
        {
            "method": found.method.name,
            "class_specific": found.method.class_specific,
            "target": None if found.target is None else _class(found.target, class_names, explained),
            "logit": found.logit,
            "map_key": found.key,
            "overlay": f"{found.key}.png" if pictures else None,
            "prefix_mass": found.prefix_mass,
            "entropy": found.entropy,
            "trust": None if found.trust is None else found.trust.to_dict(),
        }
        for found in explained.maps
    ]
    return {
        "path": explained.item.path,
        "name": explained.item.name,
        "sha256": explained.sha256,
        "size": list(explained.image.size),
        "box": list(explained.geometry.box),
        "predicted": _class(explained.predicted, class_names, explained),
        "grid": list(explained.grid),
        "map_key": maps[0]["map_key"],
        "overlay": maps[0]["overlay"],
        "maps": maps,
    }


def _class(index: int, class_names: Sequence[str], explained: ExplainedImage) -> dict[str, Any]:
    return {"index": index, "name": class_names[index], "probability": float(explained.probabilities[index])}


def _write_overlay(
    output: Path, explained: ExplainedImage, found: ExplainedMap, class_names: Sequence[str]
) -> None:
    """Draw and write one picture; it is whole or absent."""
    picture = draw_map(explained, found, class_names)
    temporary = output / f".{found.key}.png.tmp"
    # run lengths alone: a third of the time of the default, and photos hardly compress any further
    picture.save(temporary, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    temporary.replace(output / f"{found.key}.png")


def draw_map(explained: ExplainedImage, found: ExplainedMap, class_names: Sequence[str]) -> Image.Image:
    """The picture of one map, or the contact sheet of several."""
    assert found.scale is not None
    shares = 100 * explained.probabilities
    caption = [f"predicted: {class_names[explained.predicted]}  {shares[explained.predicted]:.1f} %"]
    if found.values.ndim == 4:
        layers, heads = found.values.shape[:2]
        return draw_sheet(
            found.values,
            layers=[f"layer {layer}" for layer in range(layers)] if layers > 1 else [""],
            heads=[f"head {head}" for head in range(heads)] if heads > 1 else ["mean"],
            scale=found.scale,
            caption=[*caption, found.method.title],
        )
    about = "knows no class"
    if found.target is not None:
        about = f"for {class_names[found.target]}  {shares[found.target]:.1f} %"
    fixed = found.scale.label.endswith("fixed scale")
    return draw_overlay(
        explained.image,
        as_even_shares(found.values) if fixed else found.values,
        explained.geometry,
        scale=found.scale,
        caption=[*caption, f"{found.method.title}, {about}"],
        warnings=() if found.trust is None else found.trust.warnings,
    )
