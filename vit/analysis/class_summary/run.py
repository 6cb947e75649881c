"""A model and images to a summary of what each class is recognised by, its file and its page."""

import json
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from PIL import Image

from vit.analysis.class_summary.masks import Masks, find_mask, find_masks, is_inside
from vit.analysis.class_summary.page import build_summary_page
from vit.analysis.class_summary.summary import (
    MAX_IMAGES_A_CLASS,
    Summary,
    SummaryImages,
    summarize_classes,
)
from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.data.open import open_for_model
from vit.data.preprocess import Preprocess
from vit.evaluation.images import match_classes
from vit.explanation.best_method import choose_methods
from vit.explanation.explainer import choose_explain_batch_size
from vit.explanation.items import ImageItem, items_from_dataset, items_from_images
from vit.runtime.files import prepare_output, write_text
from vit.runtime.progress import show_progress

SUMMARY_FILE = "summary.json"
# of all images, as the model sees them
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, repr=False)
class SummaryResult:
    """A `Summary`, which can be written."""

    summary: Summary

    def __repr__(self) -> str:
        return repr(self.summary)

    def save(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write summary.html and summary.json.

        Args:
            directory: a new or empty directory.
            overwrite: replace an earlier summary in it.

        Raises:
            FileExistsError: it holds files, and `overwrite` is not set or they are not ours.
        """
        # before anything is written: a page that fails leaves no directory
        page = build_summary_page(self.summary)
        output = prepare_output(Path(directory), overwrite=overwrite)
        write_text(output / "summary.html", page)
        content = json.dumps(self.summary.to_dict(), indent=1, ensure_ascii=False)
        write_text(output / SUMMARY_FILE, content + "\n")


def run_summary(
    bundle: Bundle,
    inputs: Sequence[str | Image.Image] | None,
    *,
    method: str,
    masks: str | Path | None,
    batch_size: int | None,
) -> SummaryResult:
    """Summarise the classes of a model; arguments and errors as of `vit.summarize_classes`."""
    if not bundle.class_names:
        raise ValueError("a model without classes has nothing to summarise by class")
    (chosen_method,) = choose_methods(
        ("libra-removal" if method == "auto" else method,), bundle, num_images=1
    )
    items, labels = _find_images(bundle, inputs)
    max_images = _MAX_BYTES // (3 * np.prod(bundle.preprocess.image_size))
    chosen = _choose(labels, len(items), max_images=int(max_images))
    items = [items[index] for index in chosen]
    masks_by_name = None if masks is None else find_masks(Path(masks))

    pixels = []
    mask_pixels = []
    read_indices = []
    with ThreadPoolExecutor() as pool, show_progress("reading", len(items)) as advance:
        futures = [pool.submit(_read, item, bundle.preprocess, masks_by_name) for item in items]
        for index, future in enumerate(futures):
            try:
                image, mask = future.result()
            except OSError as error:
                warnings.warn(f"left out: {' '.join(str(error).split())}", stacklevel=2)
                continue
            pixels.append(image)
            mask_pixels.append(mask)
            read_indices.append(index)
            advance(1)
    if not pixels:
        raise ValueError("there are no images to summarise")
    if masks_by_name is not None and np.isnan(mask_pixels).all():
        raise ValueError(f"{masks} has no mask whose name is that of an image")

    readable = [chosen[index] for index in read_indices]
    images = SummaryImages(
        pixels=np.stack(pixels),
        classes=None if labels is None else labels[readable],
        paths=[printable(items[index].path) for index in read_indices],
        masks=None if masks_by_name is None else np.stack(mask_pixels),
    )
    device = next(bundle.model.parameters()).device
    size = batch_size or choose_explain_batch_size(bundle.preprocess.image_size, device)
    return SummaryResult(summarize_classes(bundle, images, method=chosen_method, batch_size=size))


def _find_images(
    bundle: Bundle, inputs: Sequence[str | Image.Image] | None
) -> tuple[list[ImageItem], NDArray[np.int64] | None]:
    """The images, and their labels where they have any: those of a data set, or the names of the
    folders that they lie in."""
    names = bundle.class_names
    if inputs is None:
        if bundle.passed_images is not None:
            source = bundle.passed_images.split()
        else:
            source = open_for_model(None, trained_on=bundle.config.get("data", {})).split("test")
        class_indices = match_classes(
            source.labels, source_classes=source.class_names, model_classes=names
        )
        return items_from_dataset(source, count=len(source)), class_indices[source.labels]

    items = items_from_images(inputs)
    folders = [Path(item.path).parent.name for item in items]
    if not set(folders) <= set(names):
        return items, None
    return items, np.array([names.index(folder) for folder in folders], dtype=np.int64)


def _choose(labels: NDArray[np.int64] | None, count: int, *, max_images: int) -> list[int]:
    """Of each class as many as are used, of all no more than fit into memory; drawn at random."""
    order = np.random.default_rng(0).permutation(count)
    if labels is None:
        return sorted(order[:max_images].tolist())
    present = np.unique(labels)
    images_a_class = min(MAX_IMAGES_A_CLASS, max(max_images // len(present), 1))
    chosen: list[int] = []
    for label in present:
        chosen += order[labels[order] == label][:images_a_class].tolist()
    return sorted(chosen)


def _read(
    item: ImageItem, preprocess: Preprocess, masks: Masks | None
) -> tuple[UInt8[np.ndarray, "H W 3"], Float[np.ndarray, "H W"]]:
    """An image and its mask as the model sees them; NaN without a mask. Raises OSError where either
    can't be read."""
    try:
        photo, _ = item.read()
        pixels = preprocess.to_uint8(photo)
        read_mask = None if masks is None else find_mask(masks, item.path)
        if read_mask is None:
            return pixels, np.full(pixels.shape[:2], np.nan, np.float32)
        mask = read_mask()
    except ValueError as error:
        raise OSError(str(error)) from error
    if mask.size != photo.size:
        raise ValueError(
            f"the mask of {item.path} has {mask.width} × {mask.height} pixels, the image {photo.width} ×"
            f" {photo.height}; a mask covers its image"
        )
    # whatever is not black lies on the object
    inside = Image.fromarray(is_inside(mask)).convert("RGB")
    return pixels, preprocess.to_uint8(inside)[..., 0].astype(np.float32) / 255
