"""What explaining images gives: maps as tensors, and the files that `vit attention` writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.bundle import Bundle
from vit.explanation.faithfulness.sanity_checks import SanityCheck
from vit.explanation.render.explained import ExplainedImage, Settings
from vit.explanation.render.overlay import MAX_SIDE
from vit.explanation.render.write import PICTURES, MapWriter
from vit.runtime.arguments import check_choice
from vit.runtime.output_dir import prepare_output

FORMATS = (*PICTURES, "npz")


@dataclass
class Explanation:
    """Maps of a batch on the patch grid, and what the model answered."""

    method: str
    maps: Float[Tensor, "B ..."]  # [B, rows, columns], or [B, T, rows, columns] of T classes an image, as below
    targets: Int[Tensor, "B ..."]  # the class each map is about; the predicted one where a method depends on none
    probabilities: Float[Tensor, "B C"]
    prefix_mass: Float[Tensor, "B ..."]  # fraction of the relevance in class, distillation and register tokens
    entropy: Float[Tensor, "B ..."]  # nats, 0 to log(patches)


@dataclass
class Explanations:
    """Maps of images, first to last as they were given, and what the model answered."""

    bundle: Bundle
    settings: Settings
    images: list[ExplainedImage]
    unreadable: list[tuple[str, str]]  # path and reason of images that are left out
    # formats of `save` beside FORMATS, by name: called with the explanations and the directory
    extra_formats: Mapping[str, Callable[["Explanations", Path], None]] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """The n images' paths; `image-00000` and so on of images given in memory."""
        return [of_image.item.path for of_image in self.images]

    @property
    def maps(self) -> dict[str, Float[Tensor, "n ..."]]:
        """Each method's maps, float32 on the patch grid: [n, rows, columns]; [n, T, rows, columns] of T classes an
        image; [n, layers, heads, rows, columns] of the method raw with every layer or head."""
        stacks = {}
        for name in self.settings.methods:
            found = [[m.values for m in of_image.maps if m.method.name == name] for of_image in self.images]
            stacked = torch.from_numpy(np.array(found))  # [n, T, …]
            stacks[name] = stacked[:, 0] if stacked.shape[1] == 1 else stacked
        return stacks

    @property
    def targets(self) -> Int[Tensor, "n ..."]:
        """The class that each image's map is about, [n], or [n, T]."""
        targets = torch.tensor([of_image.targets for of_image in self.images])
        return targets[:, 0] if targets.shape[1] == 1 else targets

    @property
    def probabilities(self) -> Float[Tensor, "n C"]:
        """What the model answered, at the temperature of its model file."""
        return torch.from_numpy(np.stack([of_image.probabilities for of_image in self.images]))

    @property
    def sanity_checks(self) -> dict[str, list[list[SanityCheck]]]:
        """By method, image and class; no classes where none were asked for."""
        checks = [[(m.method.name, m.sanity_check) for m in of_image.maps] for of_image in self.images]
        return {
            method: [[check for name, check in of_image if name == method and check] for of_image in checks]
            for method in self.settings.methods
        }

    def save(
        self,
        directory: str | Path,
        *,
        formats: Sequence[str] = ("png", "npz"),
        max_side: int = MAX_SIDE,
        overwrite: bool = False,
    ) -> None:
        """Write overlays (png, jpeg or webp), maps.npz (npz), manifest.json and, for the format html, a gallery. Raises
        ValueError for an unknown format, FileExistsError where `directory` holds files; `overwrite` replaces an earlier
        result."""
        for name in formats:
            check_choice(name, (*FORMATS, *self.extra_formats), name="format")
        prepare_output(Path(directory), overwrite=overwrite)
        with MapWriter(directory, self.bundle, self.settings, formats=formats, max_side=max_side) as writer:
            writer.unreadable = [{"path": path, "reason": reason} for path, reason in self.unreadable]
            for of_image in self.images:
                writer.add([of_image])
        for name in formats:
            if name in self.extra_formats:
                self.extra_formats[name](self, Path(directory))
