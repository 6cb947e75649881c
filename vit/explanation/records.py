"""The results of explaining: a map, an image, and all images."""

import base64
import html
import io
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

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
from vit.explanation.render.overlay import blend, panel_size
from vit.explanation.render.scale import ColourScale, PatchMap, fit_scale, relative_to_uniform
from vit.runtime.arguments import shorten

if TYPE_CHECKING:
    from vit.explanation.render.figure import Tile

# index, name and probability; for a prediction of several labels also these
ClassValues = Mapping[str, Any]


@dataclass(repr=False)
class MapResult:
    """One map of one image.

    Attributes:
        method: The method.
        key: Name in maps.npz, and of the overlay without the suffix.
        values: The map, float32.
        target: The class that is explained; None if the method doesn't depend on the class, or if
            the target isn't about a class.
        target_name: Name of that class or target.
        score: The class's logit, or the value of the target; some methods' maps grow with it.
        sanity_check: The patch-removal test; None if it wasn't asked for.
        is_label: The model predicts several labels an image.
        is_predicted: False for a label that the model doesn't predict.
    """

    method: Method
    key: str
    values: PatchMap
    target: int | None = None
    target_name: str | None = None
    score: float | None = None
    sanity_check: SanityCheck | None = None
    is_label: bool = False
    is_predicted: bool = True

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
    def scale(self) -> ColourScale:
        """Scale of the colours, up to the largest value."""
        return fit_scale(self.shown_values, signed=self.method.signed)

    @property
    def shown_values(self) -> PatchMap:
        """The values in multiples of the average patch."""
        return relative_to_uniform(self.values)

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
        if self.scale.is_flat:
            text += "; nearly even"
        return text


@dataclass(repr=False)
class ImageResult:
    """An image and, when it is explained, its maps and the model's outputs.

    Attributes:
        item: The image as it was asked for.
        sha256: Digest of its file, or of the pixels of an image in memory.
        class_names: Names of the model's classes.
        geometry: Its size, and the box of the model's input.
        image: The upright RGB image; None for a large one, which `read_image` reads again.
        pixels: The model's input, until the image is in the result.
        maps: Maps in the order of the methods, then in the order of the classes.
        probabilities: Probabilities of the classes at the temperature of the model file; empty if
            the model has no probabilities.
        predicted: Index of the predicted class, or of the most probable label that is predicted, if
            any is; None if the model has no probabilities.
        targets: Classes that are explained; empty if the target isn't about a class.
        labels: Labels that are predicted, the most probable first; None for one class an image.
        output: Name and value of such a target.
        attention: The attention of heads and patches, if it was asked for; see
            `measure_attention`.
    """

    item: ImageItem
    sha256: str
    class_names: Sequence[str]
    geometry: Geometry
    image: Image.Image | None
    pixels: UInt8[np.ndarray, "H W 3"] | None
    maps: list[MapResult] = field(default_factory=list)
    probabilities: Float[np.ndarray, " C"] = field(default_factory=lambda: np.empty(0, np.float32))
    predicted: int | None = None
    targets: tuple[int, ...] = ()
    labels: list[int] | None = None
    output: str = ""
    attention: Mapping[str, Float[np.ndarray, "down across rows columns"]] | None = None

    def __repr__(self) -> str:
        """Return one line."""
        maps = shorten(", ".join(result.method.name for result in self.maps), 120)
        return f"ImageResult({shorten(self.item.path, 120)!r}: {maps or 'no maps'})"

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches, (rows, columns)."""
        rows, columns = self.maps[0].values.shape
        return rows, columns

    @property
    def prediction(self) -> ClassValues:
        """The predicted class, or the target and its value; where an image may have several labels,
        "labels" has those that are predicted."""
        if self.predicted is None:
            return {"index": None, "name": self.output, "probability": None}
        described = self._describe_class(self.predicted)
        if self.labels is not None:
            described["labels"] = [self._describe_class(index) for index in self.labels]
        return described

    def _describe_class(self, index: int) -> dict[str, Any]:
        probability = float(self.probabilities[index]) if len(self.probabilities) else None
        return {"index": index, "name": self.class_names[index], "probability": probability}

    def describe(self, *, has_overlays: bool) -> dict[str, Any]:
        """Describe the image for the manifest."""
        maps = []
        for result in self.maps:
            target = None
            if result.target is not None:
                target = self._describe_class(result.target)
            elif result.target_name is not None:
                target = {"index": None, "name": result.target_name, "probability": None}
            maps.append(
                {
                    "method": result.method.name,
                    "class_specific": result.method.class_specific,
                    "target": target,
                    "caption": result.describe(),
                    "score": result.score,
                    "map_key": result.key,
                    "overlay": f"{result.key}.png" if has_overlays else None,
                    "sanity_check": result.sanity_check and asdict(result.sanity_check),
                }
            )
        return {
            "path": self.item.path,
            "name": self.item.name,
            "title": self.item.title,
            "sha256": self.sha256,
            "size": list(self.geometry.original_size),
            "box": list(self.geometry.box),
            "predicted": self.prediction,
            "grid": list(self.grid),
            "maps": maps,
        }

    def describe_prediction(self) -> str:
        """Describe the prediction in words; without probabilities it is the name alone."""

        def describe(one: ClassValues) -> str:
            return f"{one['name']}  {100 * one['probability']:.1f} %"

        predicted = self.prediction
        if predicted["probability"] is None:
            return str(predicted["name"])
        labels = predicted.get("labels", [predicted])
        if not labels:
            return f"no label predicted; most probable: {describe(predicted)}"
        return f"predicted {', '.join(map(describe, labels))}"

    def caption(self, result: MapResult) -> list[str]:
        """Return the lines below a figure: the prediction first, then those of the map."""
        lines = [f"{self.item.title}: {self.describe_prediction()}", result.describe()]
        if result.target_name is not None:
            lines[-1] += f" ({result.method.title})"
        if result.sanity_check is not None:
            lines.append(f"patch-removal test: {result.sanity_check}")
        return lines

    def read_image(self) -> Image.Image:
        """Return the upright RGB image."""
        return self.image or self.item.read()[0]

    def draw_row(self) -> list["Tile"]:
        """Draw the row of the contact sheet: the photo and its maps."""
        from vit.explanation.render.figure import Tile  # matplotlib takes half a second

        photo = self.read_image()
        # reduced once, and every map is drawn over the same small photo
        photo = photo.resize(panel_size(photo.size), Image.Resampling.LANCZOS)
        row = [Tile(photo, self.describe_prediction(), None, [self.item.title])]
        for result in self.maps:
            picture = blend(photo, result.shown_values, self.geometry, scale=result.scale)
            check = result.sanity_check
            row.append(Tile(picture, "", check.verdict if check else None, [result.describe()]))
        return row


@dataclass(repr=False)
class Explanations:
    """Explained images, in the order in which they were passed.

    Attributes:
        bundle: The model; a pickled copy has none.
        class_names: Names of its classes.
        methods: Names of the methods.
        images: Images that could be read, without their pixels.
        unreadable: Path and reason for each image that could not be read.
    """

    bundle: Bundle
    methods: Sequence[str]
    images: list[ImageResult]
    unreadable: list[tuple[str, str]]
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
        from vit.explanation.render.figure import MAX_SHEET_IMAGES, draw_sheet

        rows = [image.draw_row() for image in self.images[:MAX_SHEET_IMAGES]]
        return draw_sheet(rows) if rows else Image.new("RGB", (1, 1), "white")

    @property
    def paths(self) -> list[str]:
        """Paths of the n images; `image-00000` and so on for images in memory."""
        return [image.item.path for image in self.images]

    @property
    def maps(self) -> dict[str, Float[Tensor, "n ..."]]:
        """Maps of each method, float32 on the patch grid: [n, rows, columns], or for T classes
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
