"""The results of explaining: a map, an image, and all images."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from vit.bundle import Bundle
from vit.data.preprocess import Geometry
from vit.explanation.checks.sanity_checks import SanityCheck
from vit.explanation.methods.registry import Method
from vit.explanation.render.overlay import PatchMap
from vit.runtime.arguments import shorten

# photos on the contact sheet, which are kept in memory
MAX_SHEET_IMAGES = 24


@dataclass(repr=False)
class MapResult:
    """One map of one image.

    Attributes:
        method: The method.
        key: Name in maps.npz, and of the overlay without the suffix.
        values: The map, float32.
        caption: What the map shows, in words.
        target: The class that is explained; None if the method doesn't depend on the class, or if
            the target isn't about a class.
        target_name: Name of that class or target.
        score: The class's logit, or the value of the target; some methods' maps grow with it.
        sanity_check: The patch-removal test; None if it wasn't asked for.
    """

    method: Method
    key: str
    values: PatchMap
    caption: str
    target: int | None = None
    target_name: str | None = None
    score: float | None = None
    sanity_check: SanityCheck | None = None

    def __repr__(self) -> str:
        """Return one line."""
        verdict = f", {self.sanity_check.verdict}" if self.sanity_check else ""
        return f"MapResult({self.method.name}: {shorten(self.caption, 120)}{verdict})"


@dataclass(repr=False)
class ImageResult:
    """An image and, when it is explained, its maps and the model's outputs.

    Attributes:
        path: Its name in messages and the manifest.
        name: Its name on pages and pictures, and the start of the names of its files.
        geometry: Size of the original, and the box of the model's input.
        photo: The upright RGB image, up to 512 pixels a side; None for those after the first 24.
        maps: Maps in the order of the methods, then in the order of the classes.
        prediction: Index, name and probability of the predicted class, or of the most probable
            label; where an image may have several labels, "labels" has those that are predicted.
            Without probabilities, the name is the target and its value.
        probabilities: Probabilities of the classes at the temperature of the model file; empty if
            the model has no probabilities.
        targets: Classes that are explained; empty if the target isn't about a class.
        attention: The attention of heads and patches, if it was asked for; see
            `measure_attention`.
    """

    path: str
    name: str
    geometry: Geometry
    photo: Image.Image | None
    maps: list[MapResult] = field(default_factory=list)
    prediction: Mapping[str, Any] = field(default_factory=dict)
    probabilities: Float[np.ndarray, " C"] = field(default_factory=lambda: np.empty(0, np.float32))
    targets: tuple[int, ...] = ()
    attention: Mapping[str, Float[np.ndarray, "down across rows columns"]] | None = None

    def __repr__(self) -> str:
        """Return one line."""
        maps = shorten(", ".join(result.method.name for result in self.maps), 120)
        return f"ImageResult({shorten(self.path, 120)!r}: {maps or 'no maps'})"

    def describe_class(self, index: int | None, name: str) -> dict[str, Any]:
        """Describe a class, or a target that isn't one, for the manifest."""
        probability = None
        if index is not None and len(self.probabilities):
            probability = float(self.probabilities[index])
        return {"index": index, "name": name, "probability": probability}

    def describe_prediction(self) -> str:
        """Describe the prediction in words; without probabilities it is the name alone."""
        if self.prediction["probability"] is None:
            return str(self.prediction["name"])
        labels = self.prediction.get("labels", [self.prediction])
        start = "predicted"
        if not labels:
            start, labels = "no label predicted; most probable:", [self.prediction]
        words = [f"{one['name']}  {100 * one['probability']:.1f} %" for one in labels]
        return f"{start} {', '.join(words)}"


@dataclass(repr=False)
class Explanations:
    """Explained images, in the order in which they were passed.

    Attributes:
        bundle: The model.
        methods: Names of the methods.
        images: Images that could be read, the first with their photos.
        unreadable: Path and reason for each image that could not be read.
    """

    bundle: Bundle
    methods: Sequence[str]
    images: list[ImageResult]
    unreadable: list[tuple[str, str]]

    def __repr__(self) -> str:
        """Return one line, because notebooks show the result of a cell."""
        return (
            f"Explanations({len(self.images)} images by {', '.join(self.methods)};"
            f" {len(self.unreadable)} could not be read)"
        )

    def _repr_jpeg_(self) -> bytes:
        """Return the contact sheet, which notebooks show and keep: JPEG is an eighth of the
        size."""
        file = io.BytesIO()
        self.draw_sheet().save(file, "JPEG", quality=75)
        return file.getvalue()

    def draw_sheet(self) -> Image.Image:
        """Draw the first images with their maps."""
        from vit.explanation.render.figure import draw_sheet  # matplotlib takes half a second

        return draw_sheet(self.images[:MAX_SHEET_IMAGES])

    @property
    def maps(self) -> dict[str, Float[Tensor, "n ..."]]:
        """Maps of each method, float32 on the patch grid: [n, rows, columns], or for T labels
        [n, T, rows, columns]. Images of fewer labels than others end with maps of NaN."""
        found = {}
        for name in self.methods:
            values = [
                [result.values for result in image.maps if result.method.name == name]
                for image in self.images
            ]
            found[name] = _stack(values, np.full(values[0][0].shape, np.nan, np.float32))
        return found

    @property
    def targets(self) -> Int[Tensor, "n ..."]:
        """Class that is explained for each image, [n], or [n, T], in which -1 stands where an image
        has fewer labels than others; [n, 0] if the target isn't about a class."""
        return _stack([image.targets for image in self.images], -1).long()

    @property
    def probabilities(self) -> Float[Tensor, "n C"]:
        """Probabilities of the classes at the temperature of the model file."""
        return torch.from_numpy(np.stack([image.probabilities for image in self.images]))

    @property
    def checks(self) -> dict[str, list[list[SanityCheck]]]:
        """Tests by method, image and class; no classes if none were asked for."""
        return {
            name: [
                [
                    result.sanity_check
                    for result in image.maps
                    if result.method.name == name and result.sanity_check
                ]
                for image in self.images
            ]
            for name in self.methods
        }


def _stack(rows: Sequence[Sequence[Any]], fill: Any) -> Tensor:
    """Stack rows [n, T, ...], of which shorter ones are filled up; one column has no axis."""
    width = max(map(len, rows))
    stacked = torch.from_numpy(np.array([[*row, *[fill] * (width - len(row))] for row in rows]))
    return stacked[:, 0] if width == 1 else stacked
