"""Explanations as files: those of `vit.explanation`, the gallery and TensorBoard."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from vit.explanation.explainer import Explainer
from vit.explanation.faithfulness.best_method import read_best_method
from vit.explanation.items import ImageItem
from vit.explanation.records import Explanations, ImageResult
from vit.explanation.writer import MapWriter, draw_map
from vit.pages.gallery import Gallery
from vit.pages.page import name_model


def write_explanations(
    explainer: Explainer, items: Sequence[ImageItem], map_writer: MapWriter
) -> Explanations:
    """Explain images and write each batch as soon as it is explained.

    Args:
        explainer: explains them.
        items: the images.
        map_writer: writes overlays, arrays and the manifest; its formats may also name the gallery
            (html) and TensorBoard's event files (tensorboard), which are written here.

    Returns:
        The explanations of the images that could be read.

    Raises:
        ValueError: where no image could be read.
    """
    bundle = explainer.bundle
    formats = map_writer.options.formats
    observers: list[Callable[[Sequence[ImageResult]], object]] = [map_writer.add]
    gallery: Gallery | None = None
    if "html" in formats:
        best_method = None  # where it was not measured
        with suppress(ValueError, OSError):
            best_method = read_best_method(bundle).method
        gallery = Gallery(bundle.class_names, num_images=len(items), best_method=best_method)
        observers.append(gallery.add)
    if "tensorboard" in formats:
        from torch.utils.tensorboard import SummaryWriter  # an optional library

        event_writer = SummaryWriter(map_writer.output / "tensorboard")
        observers.append(partial(_add_pictures, event_writer, bundle.class_names))

    with map_writer:
        explanations = explainer.explain(
            items, *observers, token_bytes=lambda: gallery.token_bytes if gallery else 0
        )
        map_writer.unreadable = explanations.unreadable
    if not map_writer.entries:
        reason = explanations.unreadable[0][1]
        raise ValueError(f"none of the {len(items)} images could be read; {reason}")
    if gallery is not None:
        title = f"Attention maps of {name_model(bundle.name)}"
        gallery.write(map_writer.output / "gallery.html", title=title)
    return explanations


def _add_pictures(
    event_writer: Any, class_names: Sequence[str], images: Sequence[ImageResult]
) -> None:
    """The overlays as images of a TensorBoard run."""
    for image in images:
        for result in image.maps:
            picture = np.asarray(draw_map(image, result, class_names))
            event_writer.add_image(f"attention/{result.key}", picture, dataformats="HWC")
    event_writer.flush()
