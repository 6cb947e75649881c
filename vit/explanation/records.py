"""The records of explaining: what is known of a map, of an image and of all of them."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from vit.bundle import Bundle
from vit.data.preprocess import Geometry
from vit.explanation.checks.sanity_checks import SanityCheck
from vit.explanation.items import ImageItem
from vit.explanation.methods.registry import Method
from vit.explanation.render.contact_sheet import MAX_SHEET_IMAGES, SheetRow, draw_contact_sheet
from vit.explanation.render.overlay import (
    ColourScale,
    PatchMap,
    blend,
    panel_size,
    relative_to_uniform,
)
from vit.explanation.render.token_details import TokenDetails
from vit.options import ExplainOptions

ClassValues = Mapping[str, Any]  # index, name and probability
_MAX_NAMED_SINKS = 3  # below a picture


def describe_prediction(predicted: ClassValues) -> str:
    """A prediction in words; of a model without probabilities what its name says."""
    if predicted["probability"] is None:
        return str(predicted["name"])
    return f"predicted {predicted['name']}  {100 * predicted['probability']:.1f} %"


def name_sinks(fraction: float) -> list[str]:
    """What attention sinks hold of a map, in short; nothing without any."""
    return [f"{100 * fraction:.0f} % on attention sinks"] if fraction else []


@dataclass(frozen=True)
class Sink:
    """A patch that draws attention without being looked at, and in which layers."""

    row: int
    column: int
    layers: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.layers))
        return f"row {self.row}, column {self.column} (layer {numbers})"


@dataclass
class MapResult:
    """One map of one image.

    Args:
        method: what made it.
        key: its name in maps.npz, and of its overlay without the suffix.
        values: float32, [rows, columns].
        prefix_mass: fraction of the relevance in prefix tokens.
        entropy: nats, 0 to log(patches).
        target: the class it is about; None for a method that does not depend on the class, and for
            a target of another kind.
        target_name: of that class, or of that target.
        score: the class's logit, or the value of that target: some methods' maps grow with it.
        sanity_check: None where it was not asked for.
        sinks: attention sinks, of a method that has any; those that hold most first.
        scale: of its colours; set once all images of the batch are explained.
    """

    method: Method
    key: str
    values: PatchMap
    prefix_mass: float
    entropy: float
    target: int | None = None
    target_name: str | None = None
    score: float | None = None
    sanity_check: SanityCheck | None = None
    sinks: tuple[Sink, ...] = ()
    scale: ColourScale | None = None

    @property
    def shown_values(self) -> PatchMap:
        """The values in multiples of an even share."""
        return relative_to_uniform(self.values)

    @property
    def sink_fraction(self) -> float:
        """What the attention sinks hold of the map, 0 to 1."""
        if not self.sinks:
            return 0.0
        held = sum(float(abs(self.values[sink.row, sink.column])) for sink in self.sinks)
        return held / float(np.abs(self.values).sum())

    def describe_sinks(self) -> str:
        """The attention sinks in words; empty without any."""
        if not self.sinks:
            return ""
        one = len(self.sinks) == 1
        subject = "one patch draws" if one else f"{len(self.sinks)} patches draw"
        places = "; ".join(map(str, self.sinks[:_MAX_NAMED_SINKS]))
        more = len(self.sinks) - _MAX_NAMED_SINKS
        others = f"; and {more} more" if more > 0 else ""
        return (
            f"attention sinks: {subject} the attention of nearly all others, whatever they show,"
            f" and {'holds' if one else 'hold'} {100 * self.sink_fraction:.0f} % of the map:"
            f" {places}{others}"
        )

    def describe(self) -> str:
        """What the map shows, in words."""
        text = "where information flows from, for any class"
        if self.method.name == "raw":
            text = "what one layer attends to, for any class"
        if self.target is not None:
            against = " (red) and against it (blue)" if self.method.signed else ""
            text = f"what speaks for {self.target_name}{against}"
        elif self.target_name is not None:
            against = " (red) and lowers it (blue)" if self.method.signed else ""
            text = f"what raises {self.target_name}{against}"
        is_flat = self.scale is not None and self.scale.is_flat
        return f"{text}; nearly even" if is_flat else text


@dataclass
class ImageResult:
    """An image and, once it is explained, its maps and what the model answered.

    Args:
        item: the image as it was asked for.
        sha256: of its file, or of its pixels where it came from memory.
        geometry: its size, and where the model's input lies on it.
        image: the upright RGB image; None for a large one, which `read_image` reads again.
        pixels: as the model sees it, until the batch was observed.
        maps: in the order of the methods, of one method in the order of the classes.
        probabilities: of the classes, at the temperature of the model file; none where the model
            gives no probabilities.
        targets: the classes that are explained; none where another target is.
        output: that target and its value.
        tokens: what each token attends to, only where it was asked for.
    """

    item: ImageItem
    sha256: str
    geometry: Geometry
    image: Image.Image | None
    pixels: UInt8[np.ndarray, "H W 3"] | None
    maps: list[MapResult] = field(default_factory=list)
    probabilities: Float[np.ndarray, " C"] = field(default_factory=lambda: np.empty(0, np.float32))
    targets: tuple[int, ...] = ()
    output: str = ""
    tokens: TokenDetails | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        rows, columns = self.maps[0].values.shape[-2:]
        return rows, columns

    @property
    def predicted(self) -> int | None:
        """The index of the most probable class; None where the model gives no probabilities."""
        return int(self.probabilities.argmax()) if len(self.probabilities) else None

    def describe_class(self, index: int | None, class_names: Sequence[str]) -> ClassValues:
        """A class and its probability; without one, what is explained and its value."""
        if index is None:
            return {"index": None, "name": self.output, "probability": None}
        probability = float(self.probabilities[index]) if len(self.probabilities) else None
        return {"index": index, "name": class_names[index], "probability": probability}

    def describe_target(self, result: MapResult, class_names: Sequence[str]) -> ClassValues | None:
        """What one of the maps is about, as `describe_class`; None where it is of any class."""
        if result.target is not None:
            return self.describe_class(result.target, class_names)
        if result.target_name is not None:
            return {"index": None, "name": result.target_name, "probability": None}
        return None

    def describe_prediction(self, class_names: Sequence[str]) -> str:
        """What the model answered, in words."""
        return describe_prediction(self.describe_class(self.predicted, class_names))

    def read_image(self) -> Image.Image:
        """The upright RGB image."""
        return self.image or self.item.read()[0]


@dataclass(repr=False)
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

    def __repr__(self) -> str:
        """One line: notebooks show a result that ends a cell."""
        methods = ", ".join(self.options.methods)
        return (
            f"Explanations({len(self.images)} images by {methods};"
            f" {len(self.unreadable)} could not be read)"
        )

    def _repr_html_(self) -> str:
        """The contact sheet, which notebooks show."""
        file = io.BytesIO()
        self.draw_sheet().save(file, "PNG")
        data = base64.b64encode(file.getvalue()).decode()
        text = html.escape(repr(self))
        return f'<img alt="{text}" style="max-width:100%" src="data:image/png;base64,{data}">'

    def show(self) -> None:
        """Open the contact sheet in the system's viewer of pictures."""
        self.draw_sheet().show(title=repr(self))

    def draw_sheet(self) -> Image.Image:
        """The first images, each with its maps beside it; without images, an empty picture."""
        class_names = self.bundle.class_names
        smooth = self.options.interpolation == "smooth"
        rows = []
        for image in self.images[:MAX_SHEET_IMAGES]:
            photo = image.read_image()
            photo = photo.resize(panel_size(photo.size), Image.Resampling.LANCZOS)
            pictures = [photo]
            texts = [[image.item.title, image.describe_prediction(class_names)]]
            for result in image.maps:
                assert result.scale is not None
                values = result.shown_values
                pictures.append(
                    blend(photo, values, image.geometry, scale=result.scale, smooth=smooth)
                )
                verdict = [result.sanity_check.verdict] if result.sanity_check else []
                texts.append([result.describe(), *verdict, *name_sinks(result.sink_fraction)])
            rows.append(SheetRow(pictures, texts))
        return draw_contact_sheet(rows) if rows else Image.new("RGB", (1, 1), "white")

    @property
    def paths(self) -> list[str]:
        """The n images' paths; `image-00000` and so on of images given in memory."""
        return [image.item.path for image in self.images]

    @property
    def maps(self) -> dict[str, Float[Tensor, "n ..."]]:
        """Each method's maps, float32 on the patch grid: [n, rows, columns]; [n, T, rows, columns]
        of T classes an image."""
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
