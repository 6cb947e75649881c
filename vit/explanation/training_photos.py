"""The training photos that are nearest to a photo, with their pictures for pages."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset, printable
from vit.data.duplicates import hash_pixels
from vit.data.open import open_dataset, open_for_model, read_label_rule
from vit.explanation.render.page import encode_photo
from vit.prediction.neighbours import find_nearest
from vit.prediction.predictor import BatchPredictor, Pixels, read_from

# sources that may be listed because of a model file: they use no network
_HERE = ("digits", "folder", "imagenet", "imagenette")


@dataclass(frozen=True)
class Neighbour:
    """A training image that is similar to an image.

    Attributes:
        path: Its name within the data set.
        class_name: Its class; empty if images may have several labels.
        similarity: Cosine of the two images' features, -1 to 1.
        picture: Its picture as a data address; None if it can't be read on this machine.
    """

    path: str
    class_name: str
    similarity: float
    picture: str | None


class TrainingPhotos:
    """The training photos that a model file names.

    Only images that the model file names, that are in the recorded training folder and whose pixels
    have a recorded hash have a picture; without hashes, the list of the training images must be the
    recorded one. So the file of a stranger shows nothing that the stranger hasn't seen. Names are
    looked up in a list of that folder, in which links are followed as in training, and never opened
    as paths. Data sets that would have to be downloaded have no pictures.

    Args:
        bundle: The model.
        side: Side of the pictures in pixels.
    """

    def __init__(self, bundle: Bundle, *, side: int) -> None:
        self.bundle = bundle
        self._side = side
        # name and class of each; the class is -1 where images may have several labels
        self._named: list[tuple[str, int]] = []
        if bundle.likeness is not None:
            self._named = bundle.metadata.get("conformal", {}).get("training_images", [])

    def find(self, pixels: Sequence[Pixels], count: int) -> list[list[Neighbour]]:
        """Find the `count` training photos that are most similar to each image, an input of the
        model, uint8 [H, W, 3]; none if the model file names none."""
        return self._find(pixels, [[(count, None)] for _ in pixels])

    def find_of_classes(
        self, pixels: Sequence[Pixels], classes: Sequence[Sequence[int]]
    ) -> list[list[Neighbour]]:
        """Find the training photo of each of several classes that is most similar to each image,
        see `find`."""
        return self._find(pixels, [[(1, index) for index in indices] for indices in classes])

    def _find(
        self, pixels: Sequence[Pixels], wanted: Sequence[Sequence[tuple[int, int | None]]]
    ) -> list[list[Neighbour]]:
        """Find numbers of training photos of classes, None for any, for each image."""
        if not self._named:
            return [[] for _ in pixels]
        predictor = BatchPredictor.from_bundle(self.bundle)
        _, features = predictor.predict_with_features(read_from(pixels), count=len(pixels))
        assert self.bundle.likeness is not None
        references = self.bundle.likeness.training_features
        labels = np.array([label for _, label in self._named])
        found: list[list[Neighbour]] = []
        for row, parts in zip(features, wanted, strict=True):
            found.append([])
            for count, index in parts:
                places = np.flatnonzero((labels == index) | (index is None))
                # a class may have no features in the file
                if not len(places):
                    continue
                (nearest,), (cosines,) = find_nearest(row[None], references[places], count)
                for place, cosine in zip(places[nearest].tolist(), cosines.tolist(), strict=True):
                    path, label = self._named[place]
                    name = self.bundle.class_names[label] if label >= 0 else ""
                    found[-1].append(Neighbour(path, name, cosine, self._draw(path)))
        return found

    def _draw(self, path: str) -> str | None:
        """Draw a training photo; None if it can't be read here, or isn't the recorded one."""
        index = self._indices.get(path)
        if index is None or self._dataset is None:
            return None
        digests = self.bundle.recorded_images.digests
        # it may be deleted since it was listed
        with suppress(ValueError, OSError):
            photo = self.bundle.preprocess.to_rgb(self._dataset.image(index))
            # images that a user has passed are the user's own
            passed = self.bundle.passed_images
            if passed is not None or digests is None or np.isin(hash_pixels(photo), digests):
                return encode_photo(photo, side=self._side)
        return None

    @cached_property
    def _dataset(self) -> ImageDataset | None:
        """The training images, listed for the first picture; None if they aren't on this
        machine."""
        # the training folder may be deleted, or may contain other images
        with suppress(ValueError, OSError):
            if self.bundle.passed_images is not None:
                return self.bundle.passed_images.split("train")
            recorded = self.bundle.recorded_images
            name, root = recorded.config.get("name", ""), recorded.config.get("root")
            if name not in _HERE:
                return None
            if recorded.digests is None:
                return open_for_model(None, recorded=recorded).split("train")
            # splits and class names don't matter, because the model file names the training images
            return open_dataset(
                name, root=root, download=False, labels=read_label_rule(recorded.config)
            ).split("all")
        return None

    @cached_property
    def _indices(self) -> dict[str, int]:
        """Indices of the images that the model file names, by name."""
        if self._dataset is None:
            return {}
        named = {path for path, _ in self._named}
        names = [printable(image_id) for image_id in self._dataset.ids]
        return {name: index for index, name in enumerate(names) if name in named}
