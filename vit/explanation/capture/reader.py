"""The parts of a model that maps are read from, found once and kept."""

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

from torch import nn

from vit.explanation.capture.layers import (
    AttentionLayer,
    LayerPlace,
    find_attention_layers,
)
from vit.model.model_info import unwrap_model
from vit.model.vision_transformer import VisionTransformer

# Sources of maps, the best first. Pixels need nothing but gradients.
Source = Literal["attention", "feature map", "pixels"]
# parts of the names of modules and parameters that give positions within the attention
_POSITIONS = re.compile("rope|rel_pos|relative_position")


class ModelReader:
    """A model and the parts of it that maps need. Each is searched for when it is first needed.

    `bundle.find_once(ModelReader)` is the reader of a bundle's model. Functions of this package
    take a reader, or a module, which they search on each call.

    Attributes:
        model: The model, without the wrappers of torch.compile, DistributedDataParallel and peft.
        completeness_error: The last score that `measure_completeness_error` measured, and its
            error.
        refused: Sources that a check has refused for this model, with the reason.
        is_settled: True if the source has passed its checks.
        feature_map: Number of the output that is its feature map, see `find_feature_map`. None:
            not searched for yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap_model(model)
        self.completeness_error: tuple[Callable[..., Any], float | None] | None = None
        self.refused: dict[Source, str] = {}
        self.is_settled = False
        self.feature_map: int | None = None

    @cached_property
    def _places(self) -> list[LayerPlace] | ValueError:
        try:
            return find_attention_layers(self.model)
        except ValueError as error:
            return error

    @property
    def has_attention(self) -> bool:
        """True if there are attention layers of a known kind, and no check has refused them."""
        return "attention" not in self.refused and not isinstance(self._places, ValueError)

    @property
    def source(self) -> Source:
        """The source of maps of this model: the best that isn't refused."""
        if self.has_attention:
            return "attention"
        return "pixels" if "feature map" in self.refused else "feature map"

    def explain_refusal(self, source: Source) -> str:
        """Return why maps can't be read from a source that is refused."""
        return self.refused.get(source) or str(self._places)

    @property
    def places(self) -> list[LayerPlace]:
        """The attention layers, in order. Raises ValueError if there are none of a known kind, or
        not in all blocks."""
        if isinstance(self._places, ValueError):
            raise ValueError(str(self._places))
        return self._places

    def build_layers(self) -> list[AttentionLayer]:
        """Build an object for each attention layer, in order, that records one forward pass."""
        return [place.kind(place.name, place.module, place.block) for place in self.places]

    @property
    def is_ours(self) -> bool:
        """True for this project's model, whose blocks and head can run one by one."""
        return isinstance(self.model, VisionTransformer)

    @property
    def can_drop_tokens(self) -> bool:
        """True if tokens can be left out of a forward pass: the model has attention, and the
        attention doesn't get the positions of all patches (rotary embeddings, relative position
        biases)."""
        return self.has_attention and not self._has_positions

    @cached_property
    def _has_positions(self) -> bool:
        names = [name for name, _ in (*self.model.named_modules(), *self.model.named_parameters())]
        return any(map(_POSITIONS.search, names))


def read_model(model: nn.Module | ModelReader) -> ModelReader:
    """Return the reader of a model; a reader is returned as it is."""
    return model if isinstance(model, ModelReader) else ModelReader(model)
