"""The results of explaining: a map, an image, and all images."""

import base64
import html
import io
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from vit.explanation.render.contact_sheet import MAX_SHEET_IMAGES, Tile, draw_contact_sheet
from vit.explanation.render.overlay import blend, panel_size
from vit.explanation.render.scale import ColourScale, PatchMap, relative_to_uniform
from vit.explanation.render.token_details import TokenDetails
from vit.prediction.conformal import is_unusual
from vit.runtime.arguments import shorten

# index, name and probability; for a prediction of several labels also these
ClassValues = Mapping[str, Any]
_MAX_NAMED_SINKS = 3  # below a picture


def describe_prediction(predicted: ClassValues) -> str:
    """Describe a prediction in words; without probabilities it is the name alone."""
    if predicted["probability"] is None:
        return str(predicted["name"])
    most_probable = _describe_probability(predicted)
    labels = predicted.get("labels")
    if labels is None:
        return f"predicted {most_probable}"
    if not labels:
        return f"no label predicted; most probable: {most_probable}"
    return f"predicted {', '.join(map(_describe_probability, labels))}"


def _describe_probability(described: ClassValues) -> str:
    return f"{described['name']}  {100 * described['probability']:.1f} %"


def build_row(
    entry: Mapping[str, Any], photo: Image.Image, pictures: Sequence[Image.Image]
) -> list[Tile]:
    """Build the tiles of an image on the contact sheet.

    Args:
        entry: The image as the manifest describes it, see `ImageResult.describe`.
        photo: The photo.
        pictures: A picture for each map.
    """
    lines = [entry["title"]]
    p_value = entry.get("p_value")
    if is_unusual(p_value):
        lines.append(f"unlike the training photos (p = {p_value:.3f})")
    predicted = describe_prediction(entry["predicted"])
    row = [Tile(photo, predicted, entry.get("note") or None, lines)]
    for picture, result in zip(pictures, entry["maps"], strict=True):
        lines = [result["caption"]]
        if result["sink_fraction"]:
            lines.append(f"{100 * result['sink_fraction']:.0f} % on attention sinks")
        check = result["sanity_check"]
        row.append(Tile(picture, "", check and check["verdict"], lines))
    return row


@dataclass(frozen=True)
class Sink:
    """A patch that draws attention although little is read from it, and the layers in which it
    does."""

    row: int
    column: int
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column} (layer {', '.join(map(str, self.layers))})"


@dataclass(repr=False)
class MapResult:
    """One map of one image.

    Attributes:
        method: The method.
        key: Name in maps.npz, and of the overlay without the suffix.
        values: The map, float32.
        prefix_mass: Fraction of the relevance in prefix tokens.
        entropy: Entropy in nats, 0 to log(patches).
        target: The class that is explained; None if the method doesn't depend on the class, or if
            the target isn't about a class.
        target_name: Name of that class or target.
        score: The class's logit, or the value of the target; some methods' maps grow with it.
        sanity_check: The patch-removal test; None if it wasn't asked for.
        sinks: Attention sinks, if the method has any; those with most of the map first.
        completeness_error: Difference of the number explained from the sum of input times gradient,
            by LibraGrad's rules, as a fraction of the number: measured on one image of the model;
            None if it is at most 1 %.
        is_label: The model predicts several labels an image.
        is_predicted: False for a label that the model doesn't predict.
        scale: Scale of the colours; set when all images of the batch are explained.
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
    completeness_error: float | None = None
    is_label: bool = False
    is_predicted: bool = True
    scale: ColourScale | None = None

    def __repr__(self) -> str:
        """Return one line."""
        text = self.method.name
        if self.target_name is not None:
            text += f" of {shorten(self.target_name, 60)!r}"
        rows, columns = self.values.shape
        text += f": {rows}×{columns} patches"
        if self.sanity_check is not None:
            text += f", {self.sanity_check.verdict}"
        return f"MapResult({text})"

    @property
    def shown_values(self) -> PatchMap:
        """The values in multiples of the average patch."""
        return relative_to_uniform(self.values)

    @property
    def sink_fraction(self) -> float:
        """Fraction of the map on attention sinks, 0 to 1."""
        if not self.sinks:
            return 0.0
        # in absolute values, because signed maps have negative patches
        held = sum(float(abs(self.values[sink.row, sink.column])) for sink in self.sinks)
        return held / float(np.abs(self.values).sum())

    def describe_sinks(self) -> str:
        """Describe the attention sinks in words; empty without any."""
        if not self.sinks:
            return ""
        subject, verb = f"{len(self.sinks)} patches draw", "hold"
        if len(self.sinks) == 1:
            subject, verb = "one patch draws", "holds"
        places = "; ".join(map(str, self.sinks[:_MAX_NAMED_SINKS]))
        more = len(self.sinks) - _MAX_NAMED_SINKS
        if more > 0:
            places += f"; and {more} more"
        return (
            f"attention sinks: {subject} the attention of nearly all others in any image and"
            f" {verb} {100 * self.sink_fraction:.0f} % of the map: {places}"
        )

    def describe(self) -> str:
        """Describe in words what the map shows."""
        name = self.target_name
        if self.target is not None:
            text = f"evidence for {name}"
            if self.method.signed:
                text += f" (red) and against {name} (blue)"
            if not self.is_predicted:
                text += f"; {name} is not predicted"
        elif name is not None:
            # a number that is not about a class has no evidence, only patches that change it
            text = f"patches that raise {name}"
            if self.method.signed:
                text += " (red) and lower it (blue)"
        else:
            noun = "label" if self.is_label else "class"
            text = f"{self.method.title} (the same for every {noun})"
        # differences that are not drawn have to be named
        if self.scale is not None and self.scale.is_flat:
            text += "; nearly even"
        return text


@dataclass(repr=False)
class ImageResult:
    """An image and, when it is explained, its maps and the model's outputs.

    Attributes:
        item: The image as it was asked for.
        sha256: Digest of its file, or of the pixels of an image in memory.
        geometry: Its size, and the box of the model's input.
        image: The upright RGB image; None for a large one, which `read_image` reads again.
        pixels: The model's input, until the batch was observed.
        maps: Maps in the order of the methods, then in the order of the classes.
        probabilities: Probabilities of the classes at the temperature of the model file; empty if
            the model has no probabilities.
        predicted: Index of the predicted class, or of the most probable label that is predicted, if
            any is; None if the model has no probabilities.
        targets: Classes that are explained; empty if the target isn't about a class.
        labels: Labels that are predicted, the most probable first; None for one class an image.
        output: Name and value of such a target.
        p_value: See `vit.predict`; None if the model file can't tell or nothing is tested.
        note: "unusual" or "unsure" as in `vit.predict`; empty without a doubt.
        tokens: Details of each token, if they were asked for.
    """

    item: ImageItem
    sha256: str
    geometry: Geometry
    image: Image.Image | None
    pixels: UInt8[np.ndarray, "H W 3"] | None
    maps: list[MapResult] = field(default_factory=list)
    probabilities: Float[np.ndarray, " C"] = field(default_factory=lambda: np.empty(0, np.float32))
    predicted: int | None = None
    targets: tuple[int, ...] = ()
    labels: list[int] | None = None
    output: str = ""
    p_value: float | None = None
    note: str = ""
    tokens: TokenDetails | None = None

    def __repr__(self) -> str:
        """Return one line."""
        maps = shorten(", ".join(result.method.name for result in self.maps), 120)
        return f"ImageResult({shorten(self.item.path, 120)!r}: {maps or 'no maps'})"

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches, (rows, columns)."""
        rows, columns = self.maps[0].values.shape[-2:]
        return rows, columns

    def describe_class(self, index: int | None, class_names: Sequence[str]) -> ClassValues:
        """Describe a class and its probability; for None, the target and its value."""
        if index is None:
            return {"index": None, "name": self.output, "probability": None}
        probability = float(self.probabilities[index]) if len(self.probabilities) else None
        return {"index": index, "name": class_names[index], "probability": probability}

    def describe_predicted(self, class_names: Sequence[str]) -> ClassValues:
        """Describe the predicted class or the target, see `describe_class`; where an image may
        have several labels, "labels" describes those that are predicted."""
        described = self.describe_class(self.predicted, class_names)
        if self.labels is None or self.predicted is None:
            return described
        labels = [self.describe_class(index, class_names) for index in self.labels]
        return {**described, "labels": labels}

    def describe_target(self, result: MapResult, class_names: Sequence[str]) -> ClassValues | None:
        """Describe the class or target of a map; None if the map is the same for every class."""
        if result.target is not None:
            return self.describe_class(result.target, class_names)
        if result.target_name is not None:
            return {"index": None, "name": result.target_name, "probability": None}
        return None

    def describe(
        self, class_names: Sequence[str], *, picture_format: str | None = None
    ) -> dict[str, Any]:
        """Describe the image for the manifest. `map_key` and `overlay` are those of its first map.

        Args:
            class_names: Names of the classes.
            picture_format: Suffix of the overlays' files; None if there are none.
        """
        maps = [
            {
                "method": result.method.name,
                "class_specific": result.method.class_specific,
                "target": self.describe_target(result, class_names),
                "caption": result.describe(),
                "score": result.score,
                "map_key": result.key,
                "overlay": picture_format and f"{result.key}.{picture_format}",
                "prefix_mass": result.prefix_mass,
                "entropy": result.entropy,
                "sanity_check": result.sanity_check and asdict(result.sanity_check),
                "sinks": [asdict(sink) for sink in result.sinks],
                "sink_fraction": result.sink_fraction,
                "completeness_error": result.completeness_error,
            }
            for result in self.maps
        ]
        return {
            "path": self.item.path,
            "name": self.item.name,
            "title": self.item.title,
            "sha256": self.sha256,
            "size": list(self.geometry.original_size),
            "box": list(self.geometry.box),
            "predicted": self.describe_predicted(class_names),
            "p_value": self.p_value,
            "note": self.note,
            "grid": list(self.grid),
            "map_key": maps[0]["map_key"],
            "overlay": maps[0]["overlay"],
            "maps": maps,
        }

    def describe_prediction(self, class_names: Sequence[str]) -> str:
        """Describe the model's prediction in words."""
        return describe_prediction(self.describe_predicted(class_names))

    def read_image(self) -> Image.Image:
        """The upright RGB image."""
        return self.image or self.item.read()[0]


@dataclass(repr=False)
class Explanations:
    """Explained images, in the order in which they were passed.

    Attributes:
        bundle: The model; a pickled copy has none.
        class_names: Names of its classes.
        methods: Names of the methods.
        images: Images that could be read, without their pixels.
        unreadable: Path and reason for each image that could not be read.
        smooth: Interpolate between patches in pictures.
    """

    bundle: Bundle
    methods: Sequence[str]
    images: list[ImageResult]
    unreadable: list[tuple[str, str]]
    smooth: bool = True
    class_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.class_names = self.bundle.class_names

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: all but the model, which has a file of its own."""
        return {name: value for name, value in vars(self).items() if name != "bundle"}

    def __repr__(self) -> str:
        """Return one line, because notebooks show the result of a cell."""
        return (
            f"Explanations({len(self.images)} images by {', '.join(self.methods)};"
            f" {len(self.unreadable)} could not be read)"
        )

    def _repr_html_(self) -> str:
        """Return the contact sheet, which notebooks show."""
        file = io.BytesIO()
        # a notebook keeps it: as JPEG it is an eighth of the size
        self.draw_sheet().save(file, "JPEG", quality=75)
        data = base64.b64encode(file.getvalue()).decode()
        # names of methods may come from another package
        text = html.escape(repr(self))
        return f'<img alt="{text}" style="max-width:100%" src="data:image/jpeg;base64,{data}">'

    def show(self) -> None:
        """Show the contact sheet: in a notebook below the cell, otherwise in the system's image
        viewer."""
        if "ipykernel" in sys.modules:
            from IPython.display import display

            display(self)  # type: ignore[no-untyped-call]
        elif sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
            warnings.warn(
                "there is no screen to show pictures on; save them: .draw_sheet().save('maps.png')",
                stacklevel=2,
            )
        else:
            self.draw_sheet().show(title=repr(self))

    def draw_sheet(self) -> Image.Image:
        """Draw the first images with their maps; without images, an empty picture."""
        rows = []
        for image in self.images[:MAX_SHEET_IMAGES]:
            photo = image.read_image()
            # reduced once, and every map is drawn over the same small photo
            photo = photo.resize(panel_size(photo.size), Image.Resampling.LANCZOS)
            pictures = []
            for result in image.maps:
                assert result.scale is not None
                pictures.append(
                    blend(
                        photo,
                        result.shown_values,
                        image.geometry,
                        scale=result.scale,
                        smooth=self.smooth,
                    )
                )
            rows.append(build_row(image.describe(self.class_names), photo, pictures))
        return draw_contact_sheet(rows) if rows else Image.new("RGB", (1, 1), "white")

    @property
    def paths(self) -> list[str]:
        """Paths of the n images; `image-00000` and so on for images in memory."""
        return [image.item.path for image in self.images]

    @property
    def maps(self) -> dict[str, Float[Tensor, "n ..."]]:
        """Maps of each method, float32 on the patch grid: [n, rows, columns], or for T classes
        [n, T, rows, columns]. Images of fewer labels than others end with maps of NaN."""
        maps = {}
        for name in self.methods:
            # a method that doesn't depend on the class has one map, even if others have several
            values = [
                [result.values for result in image.maps if result.method.name == name]
                for image in self.images
            ]
            stacked = torch.from_numpy(_stack(values, np.nan))  # [n, T, …]
            # one class is the usual case, and it has no axis
            maps[name] = stacked[:, 0] if stacked.shape[1] == 1 else stacked
        return maps

    @property
    def targets(self) -> Int[Tensor, "n ..."]:
        """Class that is explained for each image, [n], or [n, T], in which -1 stands where an image
        has fewer labels than others; [n, 0] if the target isn't about a class."""
        targets = torch.from_numpy(_stack([image.targets for image in self.images], -1)).long()
        return targets[:, 0] if targets.shape[1] == 1 else targets

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


def _stack(rows: Sequence[Sequence[Any]], fill: float) -> np.ndarray:
    """Stack rows [n, T, ...], of which shorter ones are filled up."""
    width = max(map(len, rows))
    stacked = []
    for row in rows:
        # made where they are needed alone: every row is empty if the target isn't about a class
        blanks = (np.full_like(row[0], fill) for _ in range(width - len(row)))
        stacked.append([*row, *blanks])
    return np.array(stacked)
