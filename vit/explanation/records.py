"""The results of explaining: a map, an image, and all images."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vit.bundle import Bundle
from vit.data.dataset import printable
from vit.data.preprocess import Geometry
from vit.explanation.checks.sanity_checks import SanityCheck
from vit.explanation.methods.registry import Method
from vit.explanation.render.overlay import PatchMap
from vit.runtime.numbers import format_percent

# photos on the contact sheet, which are kept in memory
MAX_SHEET_IMAGES = 24
_PRECISION = 1000  # probabilities are told to a tenth of a percent


@dataclass
class MapResult:
    """One map of one image.

    Attributes:
        key: Name in maps.npz, and of the picture without the suffix.
        values: The map, float32.
        caption: Description of the map, in words.
        target: Index, name and probability of the class, or name of the number, that is explained;
            None if the method doesn't depend on it.
        sanity_check: The patch-removal test; None if it wasn't asked for.
    """

    method: Method = field(repr=False)
    key: str
    values: PatchMap = field(repr=False)
    caption: str
    target: Mapping[str, Any] | None
    sanity_check: SanityCheck | None = None


@dataclass
class ImageResult:
    """An image and, when it is explained, its maps and the model's outputs.

    Attributes:
        path: Name in messages and the manifest.
        name: Name on pages and pictures, and the start of the names of its files.
        photo: The RGB image, 224 to 512 pixels a side; None after the first 24.
        maps: In the order of the methods, then of the classes.
        prediction: Index, name and probability of the predicted class, or of the most probable
            label; "labels" has those that are predicted. Without probabilities, the name is the
            target and its value.
        probabilities: Probabilities of the classes; empty if the model has none.
        attention: The result of `measure_attention`, if it was asked for.
    """

    path: str
    name: str
    geometry: Geometry
    photo: Image.Image | None = field(repr=False)
    maps: list[MapResult] = field(default_factory=list, repr=False)
    prediction: Mapping[str, Any] = field(default_factory=dict, repr=False)
    probabilities: Float[np.ndarray, " C"] = field(
        default_factory=lambda: np.empty(0, np.float32), repr=False
    )
    attention: Mapping[str, Float[np.ndarray, "down across rows columns"]] | None = field(
        default=None, repr=False
    )

    def describe_class(self, index: int | None, name: str) -> dict[str, Any]:
        """Describe a class, or a target that isn't one, which has no index."""
        probability = None
        if index is not None and len(self.probabilities):
            probability = float(self.probabilities[index])
        return {"index": index, "name": name, "probability": probability}

    def describe_prediction(self) -> str:
        """Describe the prediction in words."""
        if self.prediction["probability"] is None:
            return str(self.prediction["name"])
        labels = self.prediction.get("labels", [self.prediction])
        start = "predicted"
        if not labels:
            start, labels = "no label predicted; most probable:", [self.prediction]
        words = [
            f"{one['name']}  {format_percent(one['probability'], _PRECISION)}" for one in labels
        ]
        return f"{start} {', '.join(words)}"

    def find_maps(self, method: str) -> list[MapResult]:
        """Find the maps of a method."""
        return [one for one in self.maps if one.method.name == method]

    def to_dict(self) -> dict[str, Any]:
        """Return the image as the manifest has it."""
        maps = [
            {
                "method": result.method.name,
                "target": result.target,
                "caption": result.caption,
                "map_key": result.key,
                "sanity_check": result.sanity_check and asdict(result.sanity_check),
            }
            for result in self.maps
        ]
        return {
            "path": printable(self.path),
            "name": self.name,
            "size": list(self.geometry.original_size),
            "box": list(self.geometry.box),
            "predicted": self.prediction,
            "maps": maps,
        }


@dataclass
class Explanations:
    """Explained images, in the order in which they were passed.

    Attributes:
        bundle: The model.
        methods: Names of the methods.
        images: Images that could be read, the first with their photos.
        unreadable: Path and reason for each image that could not be read.
    """

    bundle: Bundle = field(repr=False)
    methods: Sequence[str]
    images: list[ImageResult] = field(repr=False)
    unreadable: list[tuple[str, str]]

    def _repr_jpeg_(self) -> bytes:
        """Return the contact sheet for notebooks: PNG is eight times as large."""
        file = io.BytesIO()
        self.draw_sheet().save(file, "JPEG", quality=75)
        return file.getvalue()

    def draw_sheet(self) -> Image.Image:
        """Draw the first images with their maps."""
        from vit.explanation.render.figure import draw_sheet  # matplotlib takes half a second

        return draw_sheet(self.images[:MAX_SHEET_IMAGES])

    @property
    def maps(self) -> dict[str, Float[Tensor, "n ..."]]:
        """Maps of each method, float32: [n, rows, columns] on the patch grid, or for T labels
        [n, T, rows, columns]. Images of fewer labels than others end with maps of NaN."""
        found = {}
        for name in self.methods:
            maps = [[one.values for one in image.find_maps(name)] for image in self.images]
            rows = [torch.from_numpy(np.stack(values)) for values in maps]
            padded = pad_sequence(rows, batch_first=True, padding_value=torch.nan)
            found[name] = padded.squeeze(1)
        return found

    @property
    def checks(self) -> dict[str, list[list[SanityCheck]]]:
        """Tests by method, image and class; no classes if none were asked for."""
        return {
            name: [
                [one.sanity_check for one in image.find_maps(name) if one.sanity_check]
                for image in self.images
            ]
            for name in self.methods
        }
