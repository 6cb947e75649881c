"""The training photos that are nearest to a photo, with their pictures for pages."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from vit.bundle import Bundle
from vit.data.dataset import LABEL_FIELDS, ImageDataset, ImageRule, printable
from vit.data.duplicates import hash_pixels
from vit.data.open import open_dataset, open_for_model
from vit.explanation.render.page import encode_photo
from vit.prediction.neighbours import find_nearest
from vit.prediction.predictor import BatchPredictor, Pixels, read_from

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
    wanted: Sequence[Sequence[tuple[int, int | None]]],
    *,
    side: int,
) -> list[list[Neighbour]]:
    """Find the training photos that are most similar to each image, the model's input, with pictures
    of `side` pixels; none if the model file names none. Numbers of photos of a class, None for any,
    are `wanted` for each image.

    Only images that the model file names, that are in the recorded training folder and whose pixels
    have a recorded hash have a picture; without hashes, the list of the training images must be the
    recorded one. So the file of a stranger shows nothing that the stranger hasn't seen. Names are
    looked up in a list of that folder, in which links are followed as in training, and never opened
    as paths. Data sets that would have to be downloaded have no pictures.
    """
    # name and class of each; the class is -1 where images may have several labels
    named = bundle.metadata.get("conformal", {}).get("training_images", [])
    if bundle.likeness is None or not named:
        return [[] for _ in pixels]
    dataset = _open_training_images(bundle)
    indices = {}
    if dataset is not None:
        indices = {printable(image_id): index for index, image_id in enumerate(dataset.ids)}
    digests = None
    # images that a user has passed are the user's own
    if bundle.passed_images is None and bundle.training_hashes is not None:
        digests = bundle.training_hashes[0]

    def draw(path: str) -> str | None:
        # it may be another image, or be deleted since it was listed
        with suppress(ValueError, OSError):
            if dataset is not None and path in indices:
                photo = bundle.preprocess.to_rgb(dataset.image(indices[path]))
                if digests is None or np.isin(hash_pixels(photo), digests):
                    return encode_photo(photo, side=side)
        return None

    predictor = BatchPredictor.from_bundle(bundle)
    _, features = predictor.predict_with_features(read_from(pixels), count=len(pixels))
    labels = np.array([label for _, label in named])
    found: list[list[Neighbour]] = []
    for row, parts in zip(features, wanted, strict=True):
        found.append([])
        for count, index in parts:
            places = np.flatnonzero((labels == index) | (index is None))
            # a class may have no features in the file
            if not len(places):
                continue
            references = bundle.likeness.training_features[places]
            (nearest,), (cosines,) = find_nearest(row[None], references, count)
            for place, cosine in zip(places[nearest].tolist(), cosines.tolist(), strict=True):
                path, label = named[place]
                name = bundle.class_names[label] if label >= 0 else ""
                found[-1].append(Neighbour(path, name, cosine, draw(path)))
    return found


def _open_training_images(bundle: Bundle) -> ImageDataset | None:
    """List the training images; None if they aren't on this machine."""
    # the training folder may be deleted, or may contain other images
    with suppress(ValueError, OSError):
        if bundle.passed_images is not None:
            return bundle.passed_images.split("train")
        recorded = bundle.recorded_images
        name, root = recorded.get("name", ""), recorded.get("root")
        if name not in _HERE:
            return None
        if bundle.training_hashes is None:
            return open_for_model(None, recorded=recorded).split("train")
        # splits and class names don't matter, because the model file names the training images
        labels: dict[str, Any] = {key: recorded.get(key) for key in (*LABEL_FIELDS, "task")}
        rule = ImageRule(**labels)
        return open_dataset(name, root=root, download=False, rule=rule).split("all")
    return None
