"""What explaining gives and drawing takes: an image with its maps, and the settings they were made with."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from vit.data.images import Geometry
from vit.explanation.faithfulness.sanity_checks import SanityCheck
from vit.explanation.items import ImageItem
from vit.explanation.methods.table import MapOptions, Method, find_methods
from vit.explanation.render.overlay import SCALES, ColourScale
from vit.explanation.render.token_details import TokenDetails
from vit.runtime.arguments import check_choice


@dataclass(frozen=True)
class Settings:
    """How images are explained. Raises ValueError for an unknown method or scale. `fit_settings` replaces a batch size
    of 0 and the precision "auto" by what fits the model."""

    methods: tuple[str, ...] = ("rollout",)
    options: MapOptions = field(default_factory=MapOptions)
    target: int | str = "auto"  # the classes to explain, see `build_target_chooser`
    scale: str = "image"  # of the colours: image, batch or fixed
    sanity_checks: bool = True  # with every map
    batch_size: int = 16
    precision: str = "float32"  # of the forward pass; maps are float32

    def __post_init__(self) -> None:
        find_methods(self.methods)
        check_choice(self.scale, SCALES, name="scale")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        values = asdict(self)
        return {**values.pop("options"), **values, "methods": list(self.methods)}


@dataclass
class ExplainedMap:
    """One map of one image; `values` [rows, columns], or [layers, heads, rows, columns] of a contact sheet."""

    method: Method
    key: str  # its name in the arrays, and of its overlay without the suffix
    values: Float[np.ndarray, "*shape"]
    prefix_mass: float  # fraction of the relevance in prefix tokens; of a contact sheet, the mean
    entropy: float  # nats; of a contact sheet, the mean
    target: int | None = None  # the class it is about; None for a method that does not depend on the class
    logit: float | None = None  # of that class: some methods' maps grow with it
    sanity_check: SanityCheck | None = None
    scale: ColourScale | None = None


@dataclass
class ExplainedImage:
    """An image with all that was found about it."""

    item: ImageItem
    size: tuple[int, int]  # (width, height)
    sha256: str
    geometry: Geometry
    input_size: tuple[int, int]  # (width, height) of what the model takes
    grid: tuple[int, int]
    probabilities: Float[np.ndarray, " C"]
    targets: tuple[int, ...]  # the classes explained
    maps: list[ExplainedMap]
    tokens: TokenDetails | None  # only where asked for
    image: Image.Image | None  # None where the pixels were given back: `open` reads them again

    @property
    def predicted(self) -> int:
        return int(self.probabilities.argmax())

    @contextmanager
    def open(self) -> Iterator[Image.Image]:
        """The upright RGB image."""
        with nullcontext((self.image, "")) if self.image else self.item.open() as (image, _):
            yield image
