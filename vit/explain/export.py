"""From images to files: overlays, exact arrays and a manifest that says how each was made.

The model works on one batch while a pool of threads decodes the next and draws and writes the last. Equal
input gives equal bytes: no times, no random numbers, sorted order.
"""

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vit.data.images import read_image
from vit.data.sources import ImageSource
from vit.explain.methods import METHODS, Explainable, MapOptions, compute_maps
from vit.explain.overlay import draw_overlay, find_range
from vit.files import write_atomically, write_text

SCHEMA_VERSION = 1
_LIBRARIES = ("vit-pipeline", "torch", "numpy", "Pillow", "matplotlib")


@dataclass(frozen=True)
class ImageItem:
    """An image to explain: `path` names it for people, `name` starts its files' names."""

    path: str
    name: str
    read: Callable[[], tuple[Image.Image, str]]  # the image and the SHA-256 of its bytes


@dataclass
class Summary:
    """What an export did."""

    explained: int = 0
    unreadable: list[dict[str, str]] = field(default_factory=list)


def items_from_files(paths: Sequence[str]) -> list[ImageItem]:
    """Image files in sorted order, named by their stems; equal stems are told apart by their folders."""
    ordered = sorted(set(paths))
    return [
        ImageItem(path, name, partial(_read_file, path))
        for path, name in zip(ordered, name_images(ordered), strict=True)
    ]


def items_from_source(source: ImageSource, *, count: int) -> list[ImageItem]:
    """`count` images spread evenly over a data set's split."""
    chosen = np.linspace(0, len(source) - 1, min(count, len(source))).round().astype(int)
    names = [re.sub(r"\.\w+$", "", source.ids[index]).replace("/", "-") for index in chosen]
    return [
        ImageItem(source.ids[index], _safe(name), partial(_read_from, source, int(index)))
        for index, name in zip(chosen, names, strict=True)
    ]


def name_images(paths: Sequence[str]) -> list[str]:
    """A file name for each path that no other has: its stem, or with its folders, or with a hash of the
    path."""
    parts = [Path(path).parts for path in paths]
    shared = 0
    while parts and all(len(p) > shared + 1 for p in parts) and len({p[shared] for p in parts}) == 1:
        shared += 1
    stems = [_safe(Path(path).stem) for path in paths]
    with_folders = [_safe("-".join((*p[shared:-1], Path(p[-1]).stem))) for p in parts]
    hashed = [
        f"{stem}-{hashlib.sha256(str(path).encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"
        for stem, path in zip(stems, paths, strict=True)
    ]
    names = _unique_or(stems, _unique_or(with_folders, hashed))
    return names if len({name.casefold() for name in names}) == len(names) else hashed


def _unique_or(names: list[str], alternatives: list[str]) -> list[str]:
    counts = Counter(name.casefold() for name in names)
    return [n if counts[n.casefold()] == 1 else a for n, a in zip(names, alternatives, strict=True)]


def _safe(name: str) -> str:
    """`name` without what a file system or a shell trips over."""
    name = re.sub(r'[\x00-\x1f\x7f<>:"/\\|?*\ud800-\udfff]', "_", name).strip(" .").lstrip("-")
    return name[:120] or "image"


def _read_file(path: str) -> tuple[Image.Image, str]:
    content = Path(path).read_bytes()
    try:
        image = read_image(io.BytesIO(content))
    except ValueError as error:
        raise ValueError(str(error).removeprefix("image ")) from error
    return image, hashlib.sha256(content).hexdigest()


def _read_from(source: ImageSource, index: int) -> tuple[Image.Image, str]:
    image = source.read(index)
    return image, hashlib.sha256(image.tobytes()).hexdigest()


def export_maps(
    bundle: Explainable,
    items: Sequence[ImageItem],
    output: Path,
    *,
    methods: Sequence[str] = ("rollout",),
    options: MapOptions | None = None,
    batch_size: int = 16,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Summary:
    """Explain `items` and write overlays, maps.npz and manifest.json below `output`, which exists."""
    options = options or MapOptions()
    summary = Summary()
    entries: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    batches = [items[start : start + batch_size] for start in range(0, len(items), batch_size)]
    with ThreadPoolExecutor(max_workers=2) as pool:
        writing: list[Future[None]] = []
        coming = _submit_reads(pool, batches[0]) if batches else []
        for index, batch in enumerate(batches):
            decoded = _collect(batch, coming, summary)
            coming = _submit_reads(pool, batches[index + 1]) if index + 1 < len(batches) else []
            if decoded:
                writing += _explain_batch(bundle, decoded, output, methods, options, entries, arrays, pool)
            on_progress(len(batch))
        for future in writing:
            future.result()
    summary.explained = len(entries)
    _write_arrays(output / "maps.npz", arrays)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "method": ",".join(methods),
        "parameters": asdict(options),
        "model_sha256": getattr(bundle, "sha256", None),
        "versions": {name: version(name) for name in _LIBRARIES},
        "images": entries,
        "unreadable": summary.unreadable,
    }
    write_text(output / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return summary


Decoded = tuple[ImageItem, Image.Image, str]


def _submit_reads(
    pool: ThreadPoolExecutor, batch: Sequence[ImageItem]
) -> list[Future[tuple[Image.Image, str]]]:
    return [pool.submit(item.read) for item in batch]


def _collect(
    batch: Sequence[ImageItem], futures: Sequence[Future[tuple[Image.Image, str]]], summary: Summary
) -> list[Decoded]:
    decoded = []
    for item, future in zip(batch, futures, strict=True):
        try:
            decoded.append((item, *future.result()))
        except (ValueError, OSError) as error:
            summary.unreadable.append({"path": item.path, "reason": " ".join(str(error).split())})
    return decoded


def _explain_batch(
    bundle: Explainable,
    decoded: Sequence[Decoded],
    output: Path,
    methods: Sequence[str],
    options: MapOptions,
    entries: list[dict[str, Any]],
    arrays: dict[str, np.ndarray],
    pool: ThreadPoolExecutor,
) -> list[Future[None]]:
    """Maps of one batch into `entries` and `arrays`; their pictures into the pool."""
    device = next(bundle.model.parameters()).device
    images = bundle.preprocess([image for _, image, _ in decoded]).to(device)
    logits, _, all_maps = compute_maps(bundle.model, images, methods=methods, options=options)
    probabilities: Tensor = logits.softmax(dim=1).cpu()
    writing = []
    for row, (item, image, sha256) in enumerate(decoded):
        probability, predicted = probabilities[row].max(dim=0)
        name = bundle.class_names[int(predicted)]
        geometry = bundle.preprocess.geometry(image.size)
        written = []
        for maps in all_maps:
            values = maps.values[row, 0].cpu().numpy()
            key = f"{item.name}.{maps.method.name}"
            arrays[key] = values
            written.append(
                {
                    "method": maps.method.name,
                    "class_specific": maps.method.class_specific,
                    "map_key": key,
                    "overlay": f"{key}.png",
                    "prefix_mass": float(maps.prefix_mass[row, 0]),
                    "entropy": float(maps.entropy[row, 0]),
                }
            )
            writing.append(
                pool.submit(
                    _write_overlay,
                    output / f"{key}.png",
                    image,
                    values,
                    geometry,
                    method=maps.method.name,
                    predicted=f"predicted: {name}  {100 * float(probability):.1f} %",
                )
            )
        entries.append(
            {
                "path": item.path,
                "sha256": sha256,
                "size": list(image.size),
                "predicted": {"index": int(predicted), "name": name, "probability": float(probability)},
                "grid": list(all_maps[0].values.shape[-2:]),
                "box": list(geometry.box),
                "map_key": written[0]["map_key"],
                "overlay": written[0]["overlay"],
                "maps": written,
            }
        )
    return writing


def _write_overlay(
    path: Path, image: Image.Image, values: np.ndarray, geometry: Any, *, method: str, predicted: str
) -> None:
    kind = METHODS[method]
    about = "class-specific" if kind.class_specific else "class-agnostic"
    picture = draw_overlay(
        image,
        values,
        geometry,
        value_range=find_range([values], signed=kind.signed),
        signed=kind.signed,
        caption=[predicted, f"{kind.title} ({about})"],
        legend="scale: this image",
    )
    picture.save(path, format="PNG", compress_level=4)


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    write_atomically(path, write)
