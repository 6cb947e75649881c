"""The records of explaining: what is known of a map, of an image and of all of them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from vit.bundle import Bundle
from vit.data.images import Geometry
from vit.explanation.faithfulness.sanity_checks import SanityCheck
from vit.explanation.items import ImageItem
from vit.explanation.methods.registry import Method
from vit.explanation.render.overlay import ColourScale, relative_to_uniform
from vit.explanation.render.token_details import TokenDetails
from vit.options import ExplainOptions


@dataclass
class MapResult:
    """One map of one image, or the maps of layers and heads as one contact sheet.

    Args:
        method: what made it.
        key: its name in maps.npz, and of its overlay without the suffix.
        values: float32, [rows, columns], or [layers, heads, rows, columns] of a contact sheet.
        prefix_mass: fraction of the relevance in prefix tokens; of a contact sheet, the mean.
        entropy: nats, 0 to log(patches); of a contact sheet, the mean.
        target: the class it is about; None for a method that does not depend on the class.
        logit: of that class: some methods' maps grow with it.
        sanity_check: None where it was not asked for, and of a contact sheet.
        scale: of its colours; set once all images of the batch are explained.
    """

    method: Method
    key: str
    values: Float[np.ndarray, "*shape"]
    prefix_mass: float
    entropy: float
    target: int | None = None
    logit: float | None = None
    sanity_check: SanityCheck | None = None
    scale: ColourScale | None = None

    @property
    def is_grid(self) -> bool:
        """Whether it is a contact sheet of layers and heads."""
        return self.values.ndim == 4

    @property
    def shown_values(self) -> Float[np.ndarray, "*shape"]:
        """The values in the unit of the scale."""
        is_relative = self.scale is not None and self.scale.relative
        return relative_to_uniform(self.values) if is_relative else self.values


@dataclass
class ImageResult:
    """An image and, once it is explained, its maps and what the model answered.

    Args:
        item: the image as it was asked for.
        size: (width, height) of the upright image.
        sha256: of its file, or of its pixels where it came from memory.
        geometry: where the model's input lies on it.
        input_size: (width, height) of what the model takes.
        image: the upright RGB image; None for a large one, which `read_image` reads again.
        maps: in the order of the methods, of one method in the order of the classes.
        probabilities: of the classes, at the temperature of the model file.
        targets: the classes that are explained.
        tokens: what each token attends to, only where it was asked for.
    """

    item: ImageItem
    size: tuple[int, int]
    sha256: str
    geometry: Geometry
    input_size: tuple[int, int]
    image: Image.Image | None
    maps: list[MapResult] = field(default_factory=list)
    probabilities: Float[np.ndarray, " C"] = field(default_factory=lambda: np.empty(0, np.float32))
    targets: tuple[int, ...] = ()
    tokens: TokenDetails | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        rows, columns = self.maps[0].values.shape[-2:]
        return rows, columns

    @property
    def predicted(self) -> int:
        """The index of the most probable class."""
        return int(self.probabilities.argmax())

    def read_image(self) -> Image.Image:
        """The upright RGB image."""
        return self.image or self.item.read()[0]


@dataclass
class Explanations:
    """Explained images, first to last as they were given.

    Args:
        bundle: the model.
        options: how they were explained.
        images: those that could be read, without their pixels.
        unreadable: path and reason of those that could not.
    """

    bundle: Bundle
    options: ExplainOptions
    images: list[ImageResult]
    unreadable: list[tuple[str, str]]

    @property
    def paths(self) -> list[str]:
        """The n images' paths; `image-00000` and so on of images given in memory."""
        return [image.item.path for image in self.images]

    @property
    def maps(self) -> dict[str, Float[Tensor, "n ..."]]:
        """Each method's maps, float32 on the patch grid: [n, rows, columns]; [n, T, rows, columns]
        of T classes an image; [n, layers, heads, rows, columns] of the method raw with every layer
        or head."""
        maps = {}
        for name in self.options.methods:
            # a method that doesn't depend on the class has one map, whatever the others have
            values = [
                [result.values for result in image.maps if result.method.name == name]
                for image in self.images
            ]
            stacked = torch.from_numpy(np.array(values))  # [n, T, …]
            maps[name] = stacked[:, 0] if stacked.shape[1] == 1 else stacked
        return maps

    @property
    def targets(self) -> Int[Tensor, "n ..."]:
        """The class that each image's map is about, [n], or [n, T]."""
        targets = torch.tensor([image.targets for image in self.images])
        return targets[:, 0] if targets.shape[1] == 1 else targets

    @property
    def probabilities(self) -> Float[Tensor, "n C"]:
        """What the model answered, at the temperature of its model file."""
        return torch.from_numpy(np.stack([image.probabilities for image in self.images]))

    @property
    def sanity_checks(self) -> dict[str, list[list[SanityCheck]]]:
        """By method, image and class; no classes where none were asked for."""
        return {
            name: [
                [
                    result.sanity_check
                    for result in image.maps
                    if result.method.name == name and result.sanity_check
                ]
                for image in self.images
            ]
            for name in self.options.methods
        }
