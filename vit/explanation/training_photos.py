"""The training photos that are nearest to a photo, with their pictures for pages."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset, printable
from vit.data.duplicates import hash_pixels
from vit.data.open import open_dataset, open_for_model, read_label_rule
from vit.data.sources.registry import is_here
from vit.data.splits import DatasetSplits
from vit.explanation.render.page import encode_photo
from vit.prediction.neighbours import find_nearest
from vit.prediction.predictor import BatchPredictor, Pixels, read_from
from vit.prediction.probabilities import Float32s


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
        splits: The data that the model was trained on, if it is open already.
    """

    def __init__(self, bundle: Bundle, *, side: int, splits: DatasetSplits | None = None) -> None:
        self.bundle = bundle
        self._side = side
        self._splits = splits or bundle.passed_images
        # name and class of each; the class is -1 where images may have several labels
        self._named: list[tuple[str, int]] = []
        if bundle.likeness is not None:
            self._named = bundle.metadata.get("conformal", {}).get("training_images", [])
        self._pictures: dict[str, str | None] = {}

    def find(self, pixels: Sequence[Pixels], count: int) -> list[list[Neighbour]]:
        """Find the training photos that are most similar to each image, if the model file names
        any.

        Args:
            pixels: Inputs of the model, uint8 [H, W, 3] each.
            count: Number of training photos for each image.
        """
        every = range(len(self._named))
        return [self._find_nearest(row, every, count) for row in self._compute_features(pixels)]

    def find_of_classes(
        self, pixels: Sequence[Pixels], classes: Sequence[Sequence[int]]
    ) -> list[list[Neighbour]]:
        """Find the training photo of each of several classes that is most similar to each image.

        Args:
            pixels: Inputs of the model, uint8 [H, W, 3] each.
            classes: Indices of the classes, for each image.
        """
        members: dict[int, list[int]] = defaultdict(list)
        for place, (_, label) in enumerate(self._named):
            members[label].append(place)
        return [
            [photo for index in indices for photo in self._find_nearest(row, members[index], 1)]
            for row, indices in zip(self._compute_features(pixels), classes, strict=True)
        ]

    def _compute_features(self, pixels: Sequence[Pixels]) -> Sequence[Float32s | None]:
        """Compute the features of each image; None if there is nothing to compare them with."""
        if not self._named:
            return [None] * len(pixels)
        predictor = BatchPredictor.from_bundle(self.bundle)
        _, features = predictor.predict_with_features(read_from(pixels), count=len(pixels))
        return list(features)

    def _find_nearest(
        self, features: Float32s | None, places: Sequence[int], count: int
    ) -> list[Neighbour]:
        """Return the most similar of the training photos at some places of the model file's list."""
        if features is None or not places:
            return []
        assert self.bundle.likeness is not None
        references = self.bundle.likeness.training_features[list(places)]
        (found,), (cosines,) = find_nearest(features[None], references, count)
        neighbours = []
        for place, cosine in zip(found.tolist(), cosines.tolist(), strict=True):
            path, label = self._named[places[place]]
            class_name = self.bundle.class_names[label] if label >= 0 else ""
            if path not in self._pictures:
                self._pictures[path] = self._read_picture(path)
            neighbours.append(Neighbour(path, class_name, cosine, self._pictures[path]))
        return neighbours

    def _read_picture(self, path: str) -> str | None:
        index = self._indices.get(path)
        if index is None or self._dataset is None:
            return None
        digests = self.bundle.recorded_images.digests
        # it may be deleted since it was listed
        with suppress(ValueError, OSError):
            photo = self.bundle.preprocess.to_rgb(self._dataset.image(index))
            # images that are open already are those of the user
            if self._splits is not None or digests is None or np.isin(hash_pixels(photo), digests):
                return encode_photo(photo, side=self._side)
        return None

    @cached_property
    def _dataset(self) -> ImageDataset | None:
        """The training images, listed for the first picture; None if they aren't on this
        machine."""
        # the training folder may be deleted, or may contain other images
        with suppress(ValueError, OSError):
            if self._splits is not None:
                return self._splits.split("train")
            recorded = self.bundle.recorded_images
            name, root = recorded.config.get("name", ""), recorded.config.get("root")
            if not is_here(name, root):
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
