"""Explanations as files: those of `vit.explanation`, and the gallery."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from vit.explanation.best_method import read_best_method
from vit.explanation.explainer import Explainer
from vit.explanation.gallery.gallery import Gallery
from vit.explanation.items import ImageItem
from vit.explanation.records import Explanations, ImageResult
from vit.explanation.render.page import name_model
from vit.explanation.writer import MapWriter


def write_explanations(
    explainer: Explainer, items: Sequence[ImageItem], map_writer: MapWriter
) -> Explanations:
    """Explain images and write each batch as soon as it is explained.

    Args:
        explainer: explains them.
        items: the images.
        map_writer: writes overlays, arrays and the manifest; its formats may also name the gallery
            (html), which is written here.

    Returns:
        The explanations of the images that could be read.

    Raises:
        ValueError: where no image could be read.
    """
    bundle = explainer.bundle
    best_method = None
    with suppress(ValueError, OSError):  # it was not measured
        best_method = read_best_method(bundle).method
    gallery = Gallery(
        bundle,
        num_images=len(items),
        best_method=best_method,
        smooth=map_writer.options.interpolation == "smooth",
    )
    has_gallery = "html" in map_writer.options.formats

    observers: list[Callable[[Sequence[ImageResult]], object]] = [map_writer.add]
    if has_gallery:
        observers.append(gallery.add)
    with map_writer:
        explanations = explainer.explain(
            items, *observers, token_bytes=lambda: gallery.token_bytes if has_gallery else 0
        )
        map_writer.unreadable = explanations.unreadable
    if not map_writer.entries:
        reason = explanations.unreadable[0][1]
        raise ValueError(f"none of the {len(items)} images could be read; {reason}")
    if has_gallery:
        title = f"Attention maps of {name_model(bundle.name)}"
        gallery.write(map_writer.output / "gallery.html", title=title)
    return explanations
