"""The page of an audit: each suspect with its photo and nearest images, to accept or reject by
keyboard; it saves corrections.csv. One HTML file."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit.analysis.audit.suspects import Audit, LabelError
from vit.bundle import Bundle
from vit.data.corrections import COLUMNS
from vit.data.dataset import ImageDataset, printable
from vit.explanation.methods.registry import compute_maps
from vit.explanation.render.page import encode_photo, encode_relative_map, render_page
from vit.explanation.targets import build_target

_TEMPLATE = Path(__file__).with_name("audit.html.jinja")
# more would make a page of tens of megabytes; audit.json has all
MAX_SUSPECTS = 200
_MAX_PAIRS = 50
_MAX_ODD = 24
# suspects with a map
_MAX_MAPS = 24
_SIDE = 224


def build_audit_page(audit: Audit, images: ImageDataset, bundle: Bundle) -> str:
    """Build the page: HTML that needs no other file.

    Args:
        audit: of these images.
        images: decoded.
        bundle: the model that the features are of, for the maps of the first suspects.
    """
    suspects = audit.label_errors[:MAX_SUSPECTS]
    neighbours = {error.path: audit.neighbours.get(error.path, ())[:4] for error in suspects}
    pairs = audit.near_duplicates[:_MAX_PAIRS]
    outliers = audit.outliers[:_MAX_ODD]
    odd = {name: described.odd[:_MAX_ODD] for name, described in audit.properties.items()}

    small = [path for near in neighbours.values() for path, _ in near]
    small += [path for pair in pairs for path in pair.paths]
    small += [image.path for image in outliers]
    small += [image.path for rows in odd.values() for image in rows]
    context = {
        "audit": audit,
        "suspects": [asdict(error) for error in suspects],
        "neighbours": neighbours,
        "pairs": pairs,
        "outliers": outliers,
        "odd": odd,
        "photos": _encode(images, (error.path for error in suspects), side=_SIDE),
        "maps": _draw_maps(bundle, images, suspects[:_MAX_MAPS]),
        "thumbnails": _encode(images, small, side=96),
        "columns": COLUMNS,
    }
    return render_page(_TEMPLATE, context)


def _encode(images: ImageDataset, paths: Iterable[str], *, side: int) -> dict[str, str]:
    """Pictures of images by their paths."""
    position = {printable(image_id): index for index, image_id in enumerate(images.ids)}
    assert images.pixels is not None
    pictures = {}
    for path in dict.fromkeys(paths):
        pictures[path] = encode_photo(Image.fromarray(images.pixels[position[path]]), side=side)
    return pictures


def _draw_maps(
    bundle: Bundle, images: ImageDataset, suspects: Sequence[LabelError]
) -> dict[str, tuple[str, str]]:
    """Map and what it shows, by path; none for a model whose attention can't be read. A model that
    knows both classes is asked why it would say one and not the other; of others there is the
    attention rollout."""
    position = {printable(image_id): index for index, image_id in enumerate(images.ids)}
    maps: dict[str, tuple[str, str]] = {}
    with suppress(ValueError):
        for error in suspects:
            pixels = images.pixels
            assert pixels is not None
            seen = bundle.preprocess.crop(pixels[position[error.path]])
            # the first map shows whether the model's attention is read right
            values, text = _explain(bundle, seen, error, verify=not maps)
            is_signed = bool((values < 0).any())
            photo = Image.fromarray(seen)
            picture = encode_relative_map(photo, values, signed=is_signed, side=_SIDE)
            maps[error.path] = (picture, text)
    return maps


def _explain(
    bundle: Bundle, pixels: np.ndarray, error: LabelError, *, verify: bool
) -> tuple[np.ndarray, str]:
    device = next(bundle.model.parameters()).device
    batch = torch.from_numpy(np.ascontiguousarray(pixels[None])).to(device)
    images = bundle.preprocess.normalize(batch)
    names = bundle.class_names
    if error.given not in names or error.suggested not in names:
        _, _, (rollout,) = compute_maps(bundle.model, images, methods=["rollout"], verify=verify)
        return rollout.values[0, 0].cpu().numpy(), "attention rollout"

    label = names.index(error.given)
    suggested = names.index(error.suggested)

    def difference(logits: Tensor) -> Tensor:
        return logits[:, suggested] - logits[:, label]

    target, choose_targets = build_target(difference, names)
    _, _, (contrast,) = compute_maps(
        bundle.model,
        images,
        methods=["libra-fullgrad"],
        choose_targets=choose_targets,
        target=target,
        verify=verify,
    )
    text = f"red speaks for {error.suggested}, blue for {error.given}"
    return contrast.values[0, 0].cpu().numpy(), text
