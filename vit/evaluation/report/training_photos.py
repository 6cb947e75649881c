"""The training photos that are nearest to a photo, with their pictures for pages."""

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image

from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.data.duplicates import hash_pixels
from vit.data.open import open_for_model
from vit.explanation.render.page import encode_photo
from vit.prediction.batch_predictor import BatchPredictor, Pixels, read_from
from vit.prediction.neighbours import find_nearest

# sources that may be listed because of a model file: they use no network
_HERE = ("digits", "folder", "imagenet", "imagenette")


@dataclass(frozen=True)
class Neighbour:
    """A training image that is similar to an image."""

    path: str  # its name within the data set
    class_name: str  # empty if images may have several labels
    similarity: float  # cosine of the two images' features
    picture: str | None  # data address; None if it can't be read on this machine


def find_training_photos(
    bundle: Bundle,
    pixels: Sequence[Pixels],
    classes: Sequence[Sequence[int]],
    *,
    side: int,
) -> list[list[Neighbour]]:
    """Find the training photo of each of some classes that is most similar to an image, the model's
    input, with its picture of `side` pixels; none if the model file names none. Where images may
    have several labels, all photos are of class -1.

    Only images that the model file names, that are in the recorded training folder and whose pixels
    have a recorded hash have a picture. So the file of a stranger shows nothing that the stranger
    hasn't seen. Names are looked up in a list of that folder, in which links are followed as in
    training, and never opened as paths. Images that a user has passed are the user's own.
    """
    # name and class of each
    named = bundle.metadata.get("conformal", {}).get("training_images", [])
    if bundle.likeness is None or not named:
        return [[] for _ in pixels]
    readers = _find_readers(bundle, {path for path, _ in named})
    digests = [] if bundle.training_hashes is None else bundle.training_hashes[0]

    def draw(path: str) -> str | None:
        # it may be another image, or be deleted since it was listed
        with suppress(KeyError, ValueError, OSError):
            photo = bundle.preprocess.to_rgb(readers[path]())
            if bundle.passed_images is not None or np.isin(hash_pixels(photo), digests):
                return encode_photo(photo, side=side)
        return None

    predictor = BatchPredictor.from_bundle(bundle)
    _, features = predictor.predict_with_features(read_from(pixels), count=len(pixels))
    labels = np.array([label for _, label in named])
    found: list[list[Neighbour]] = []
    for row, wanted in zip(features, classes, strict=True):
        found.append([])
        for index in wanted:
            places = np.flatnonzero(labels == index)
            # a class may have no features in the file
            if not len(places):
                continue
            references = bundle.likeness.training_features[places]
            ((nearest,),), ((cosine,),) = find_nearest(row[None], references, 1)
            path, _ = named[places[nearest]]
            name = "" if index < 0 else bundle.class_names[index]
            found[-1].append(Neighbour(path, name, float(cosine), draw(path)))
    return found


def _find_readers(bundle: Bundle, names: Container[str]) -> dict[str, Callable[[], Image.Image]]:
    """Find functions that read the training images of these names; none on another machine."""
    recorded = bundle.recorded_images
    # the training folder may be deleted, or may contain other images
    with suppress(ValueError, OSError):
        splits = bundle.passed_images
        if splits is None and recorded.get("name") in _HERE:
            splits = open_for_model(None, recorded=recorded)
        if splits is not None:
            dataset = splits.split("all")
            shown = zip(map(printable, dataset.ids), range(len(dataset)), strict=True)
            return {name: partial(dataset.image, place) for name, place in shown if name in names}
    return {}
