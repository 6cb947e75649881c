"""The training photos that are nearest to a photo, with their pictures for pages; `vit predict
--similar` names the same photos."""

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
from vit.prediction.neighbours import Similar, check_similar, find_similar
from vit.prediction.predictor import BatchPredictor, Pixels, read_from


@dataclass(frozen=True)
class Neighbour(Similar):
    """A training image that is similar to an image.

    Attributes:
        picture: Its picture as a data address; None if it can't be read on this machine.
    """

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
        # the reason why the model file names none; None if it names some
        self.problem: str | None = None
        try:
            check_similar(bundle)
        except ValueError as error:
            self.problem = str(error)
        self._side = side
        self._splits = splits or bundle.passed_images
        self._pictures: dict[str, str | None] = {}

    def find(self, pixels: Sequence[Pixels], count: int) -> list[list[Neighbour]]:
        """Find the training photos that are most similar to each image, if the model file names
        any.

        Args:
            pixels: Inputs of the model, uint8 [H, W, 3] each.
            count: Number of training photos for each image.
        """
        if self.problem or not len(pixels):
            return [[] for _ in pixels]
        _, features = self._predictor.predict_with_features(read_from(pixels), count=len(pixels))
        nearest = find_similar(self.bundle, features, count)
        return [[self.draw(image) for image in images] for images in nearest]

    def find_of_classes(
        self, pixels: Sequence[Pixels], classes: Sequence[Sequence[int]]
    ) -> list[list[Neighbour]]:
        """Find the training photo of each of several classes that is most similar to each image.

        Args:
            pixels: Inputs of the model, uint8 [H, W, 3] each.
            classes: Indices of the classes, for each image.
        """
        if self.problem or not len(pixels):
            return [[] for _ in pixels]
        _, features = self._predictor.predict_with_features(read_from(pixels), count=len(pixels))
        return [
            [
                self.draw(image)
                for class_index in class_indices
                # none for a class without features in the file
                for image in find_similar(self.bundle, row[None], 1, class_index=class_index)[0]
            ]
            for row, class_indices in zip(features, classes, strict=True)
        ]

    def draw(self, image: Similar) -> Neighbour:
        """Add the picture to a training photo."""
        if image.path not in self._pictures:
            self._pictures[image.path] = self._read_picture(image.path)
        return Neighbour(image.path, image.class_name, image.similarity, self._pictures[image.path])

    @cached_property
    def _predictor(self) -> BatchPredictor:
        return BatchPredictor.from_bundle(self.bundle)

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
        named = {path for path, _ in self.bundle.metadata["conformal"]["training_images"]}
        names = [printable(image_id) for image_id in self._dataset.ids]
        return {name: index for index, name in enumerate(names) if name in named}
