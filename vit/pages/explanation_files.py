"""Explanations as files: those of `vit.explanation`, the gallery and TensorBoard."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from vit.bundle import Bundle
from vit.explanation.explain import collect_explanations
from vit.explanation.explanations import Explanations
from vit.explanation.faithfulness.best_method import read_best_method
from vit.explanation.items import ImageItem
from vit.explanation.render.explained import ExplainedImage
from vit.explanation.render.write import PICTURES, MapWriter, draw_map
from vit.pages.gallery import Gallery
from vit.pages.page import name_model

FORMATS = (*PICTURES, "npz", "html", "tensorboard")
GALLERY_FILE = "gallery.html"


def check_formats(formats: Collection[str]) -> tuple[str, ...]:
    """`formats` as they are. Raises ValueError for an unknown one."""
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"unknown --format {name!r}; known: {', '.join(FORMATS)}")
    return tuple(formats)


def write_explanations(items: Sequence[ImageItem], writer: MapWriter) -> Explanations:
    """Explain `items` and write each batch as soon as it is explained, in the formats of `writer`.

    Raises ValueError where no image could be read.
    """
    bundle, directory = writer.bundle, writer.output
    gallery = _open_gallery(bundle, len(items)) if "html" in writer.formats else None
    observers: list[Callable[[list[ExplainedImage]], None]] = [writer.add]
    observers += [gallery.add] if gallery else []
    observers += [_TensorBoardImages(directory, bundle).add] if "tensorboard" in writer.formats else []
    with writer:
        found = collect_explanations(
            bundle,
            items,
            writer.settings,
            observers=observers,
            on_unreadable=writer.add_unreadable,
            token_bytes=gallery.token_bytes if gallery else 0,
        )
    if not writer.entries:
        raise ValueError(f"none of the {len(items)} images could be read; {found.unreadable[0][1]}")
    if gallery:
        gallery.write(directory / GALLERY_FILE, title=f"Attention maps of {name_model(bundle.name)}")
    return replace(found, extra_formats=EXTRA_FORMATS)


def _open_gallery(bundle: Bundle, count: int) -> Gallery:
    """An empty gallery, which will open on the method that measured best for the model, where that is known."""
    best = None
    with suppress(ValueError, OSError):
        best = read_best_method(bundle).method
    return Gallery(bundle.class_names, count=count, best=best)


def _save_gallery(explanations: Explanations, directory: Path) -> None:
    """Explains the images once more, for what each of their tokens attends to."""
    bundle, of_item = explanations.bundle, {id(of_image.item): of_image for of_image in explanations.images}
    gallery = _open_gallery(bundle, len(of_item))

    def add(batch: list[ExplainedImage]) -> None:  # without those that can no longer be read
        gallery.add([replace(of_item[id(again.item)], tokens=again.tokens, image=again.image) for again in batch])

    collect_explanations(
        bundle,
        [of_image.item for of_image in explanations.images],
        replace(explanations.settings, sanity_checks=False),
        observers=[add],
        token_bytes=gallery.token_bytes,
    )
    gallery.write(directory / GALLERY_FILE, title=f"Attention maps of {name_model(bundle.name)}")


class _TensorBoardImages:
    """Writes the overlays as images of a TensorBoard run."""

    def __init__(self, directory: Path, bundle: Bundle) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer, self._class_names = SummaryWriter(directory / "tensorboard"), bundle.class_names

    def add(self, explained: Sequence[ExplainedImage]) -> None:
        for of_image in explained:
            for found in of_image.maps:
                picture = np.asarray(draw_map(of_image, found, self._class_names))
                self._writer.add_image(f"attention/{found.key}", picture, dataformats="HWC")
        self._writer.flush()


# what `Explanations.save` writes beside its own formats
EXTRA_FORMATS: Mapping[str, Callable[[Explanations, Path], None]] = {
    "html": _save_gallery,
    "tensorboard": lambda found, directory: _TensorBoardImages(directory, found.bundle).add(found.images),
}
