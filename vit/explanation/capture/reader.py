"""The parts of a model that maps are read from, found once and kept."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.capture.discovery import (
    ChangeTokens,
    Discovered,
    StreamChanges,
    discover_layers,
)
from vit.explanation.capture.layers import AttentionLayer, LayerPlace, first_output
from vit.model.logits import compute_logits
from vit.model.model_info import find_image_size, keep_mode, unwrap_model
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.tensors import Images

# Sources of maps, the best first. Pixels need nothing but gradients.
Source = Literal["attention", "feature map", "pixels"]


@dataclass
class _Findings:
    """Findings about a model, without its modules.

    Attributes:
        attention: Its attention layers, or why there are none.
        feature_map: Number of the output that is its feature map, see `find_feature_map`.
        has_positions: True if its attention gets the positions of all patches.
        signs: The mixture of the logits that measures the pooling, 1 or -1, [C].
        pooled: Which of the tokens that leave the last block and the modules after it are pooled.
        first_averaged: First token of a mean that is pooled; -1 without a mean.
        versions: Versions of the weights with which the source has passed its checks.
    """

    attention: Discovered | ValueError | None = None
    feature_map: int | None = None
    has_positions: bool | None = None
    signs: Tensor | None = None
    pooled: int | None = None
    first_averaged: int | None = None
    versions: tuple[int, ...] | None = None


class ModelReader:
    """A model and the parts of it that maps need. Each is searched for when it is first needed.

    `read_bundle` returns that of a bundle's model. Functions of this package
    take a reader, or a module, which they search on each call.

    Attributes:
        model: The model, without the wrappers of torch.compile, DistributedDataParallel and peft.
        image_size: Height and width of its images, once they are known.
        channels: Number of channels of its images.
        refused: Sources that a check has refused for this model, with the reason.
        is_recalled: True if an earlier reader of the same module has settled the source.
        found: The findings so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap_model(model)
        self.refused: dict[Source, str] = {}
        self.is_recalled = False
        self.image_size: tuple[int, int] | None = None
        convolutions = (part for part in self.model.modules() if isinstance(part, nn.Conv2d))
        first = next(convolutions, None)
        self.channels = 3 if first is None else first.in_channels
        self.found = _Findings()

    @property
    def is_settled(self) -> bool:
        """True if the source has passed its checks with the weights that the model has now."""
        return self.found.versions == _list_versions(self.model)

    def settle(self, images: Images) -> None:
        """Note that the source has passed its checks, and keep what was found for images of this
        size: `read_model` gives it to the next reader of the module.

        A refusal isn't kept. Its reason may be the images, or weights that training changes.
        """
        self.found.versions = _list_versions(self.model)
        if self.refused or not self.has_attention:
            return
        # a model with an equality of its own can't be a key
        with _KEPT_LOCK, suppress(TypeError):
            _KEPT[self.model] = (_describe(self.model, images), self.found)

    def recall(self, images: Images) -> None:
        """Take over what an earlier reader has kept, if the model is as it was."""
        with _KEPT_LOCK, suppress(TypeError):
            description, found = _KEPT.get(self.model, (None, self.found))
            if description == _describe(self.model, images):
                self.found = found
                self.is_recalled = self.is_settled

    def forget(self) -> None:
        """Forget what checks have found, because the weights have changed."""
        self.refused.clear()
        attention = self.found.attention
        self.found = _Findings(attention if isinstance(attention, Discovered) else None)

    @property
    def has_known_size(self) -> bool:
        """True if the size of the images is known, or the model tells it."""
        if self.image_size is None:
            self.image_size = find_image_size(self.model)
        return self.image_size is not None

    @property
    def _attention(self) -> Discovered | ValueError:
        if not self.has_known_size:
            return ValueError(
                f"the size of the images of {type(self.model).__name__} is unknown, and its "
                "attention is found by running it; give preprocess=vit.Preprocess(image_size=…)"
            )
        if self.found.attention is None:
            assert self.image_size is not None
            try:
                self.found.attention = discover_layers(
                    self.model, (self.channels, *self.image_size)
                )
            except ValueError as error:
                self.found.attention = error
        return self.found.attention

    @property
    def has_attention(self) -> bool:
        """True if there are attention layers, and no check has refused them."""
        return "attention" not in self.refused and isinstance(self._attention, Discovered)

    @property
    def attention(self) -> Discovered:
        """The attention layers. Raises ValueError if there are none that can be read."""
        attention = self._attention
        if isinstance(attention, ValueError):
            raise ValueError(str(attention))
        return attention

    @property
    def places(self) -> list[LayerPlace]:
        """The layers in which all tokens attend to each other, in order. See `attention`."""
        return self.attention.layers

    @property
    def source(self) -> Source:
        """The source of maps of this model: the best that isn't refused."""
        if self.has_attention:
            return "attention"
        return "pixels" if "feature map" in self.refused else "feature map"

    def explain_refusal(self, source: Source) -> str:
        """Return why maps can't be read from a source that is refused."""
        return self.refused.get(source) or str(self._attention)

    def build_layers(self) -> list[AttentionLayer]:
        """Build an object for each attention layer, in order, that records one forward pass."""
        return [AttentionLayer(self.model, place) for place in self.places]

    @property
    def is_ours(self) -> bool:
        """True for this project's model, whose blocks and head can run one by one."""
        return isinstance(self.model, VisionTransformer)

    @property
    def can_drop_tokens(self) -> bool:
        """True if tokens can be left out of a forward pass: the model has attention, and the
        attention doesn't get the positions of all patches (rotary embeddings, relative position
        biases)."""
        if not self.has_attention:
            return False
        if self.found.has_positions is None:
            self.found.has_positions = not (self.is_ours or self._try_to_drop())
        return not self.found.has_positions

    def _try_to_drop(self) -> bool:
        """Leave some tokens out, and return whether the order of the others doesn't matter."""
        assert self.image_size is not None
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, self.channels, *self.image_size, generator=generator)
        images = images.to(next(self.model.parameters()))

        def keep_half(tokens: Tensor, *, turn: bool) -> Tensor:
            # no prefix tokens are in the second half
            first, second = tokens.tensor_split(2, dim=1)
            kept = second[:, ::2]
            return torch.cat([first, kept.flip(1) if turn else kept], dim=1)

        logits = []
        with keep_mode(self.model), torch.no_grad():
            self.model.eval()
            for turn in (False, True):
                try:
                    with self.change_tokens(partial(keep_half, turn=turn)):
                        logits.append(compute_logits(self.model, images))
                except (RuntimeError, IndexError, ValueError):  # a shape
                    return False
        error = (logits[1] - logits[0]).abs().max()
        # rounding changes plain models by up to 4e-7, and rotary positions by 2e-4 and more even
        # where random weights attend evenly (the models of the tests, five seeds)
        bound = max(2e-5, torch.finfo(images.dtype).eps)
        return bool(error <= bound * logits[0].abs().max())

    @contextmanager
    def change_tokens(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let the first block read `change(tokens)` instead of the tokens [B, N, D], which include
        prefix tokens, in one forward pass."""
        # the position embedding is added before the first block
        with self.change_links(lambda link, tokens: tokens if link else change(tokens)):
            yield

    @contextmanager
    def change_links(self, change: ChangeTokens) -> Iterator[None]:
        """Pass the tokens [B, N, D] that enter each block to `change`, and at last those that leave
        the last one, with the number of the link from 0 on; the model continues with its result."""
        with ExitStack() as stack:
            if self.attention.stream is not None:
                changes = StreamChanges(self.attention.stream, change)
                stack.enter_context(self.model.register_forward_pre_hook(changes.begin))
                stack.enter_context(changes)
            else:
                for link, place in enumerate(self.places):
                    block = self.model.get_submodule(place.block)
                    hook = partial(_change_input, partial(_change, place, partial(change, link)))
                    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
                    stack.enter_context(handle)
                hook = partial(
                    _change_output, partial(_change, place, partial(change, len(self.places)))
                )
                stack.enter_context(block.register_forward_hook(hook))
            yield


def _change(place: LayerPlace, change: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    # the model's own functions alone are counted, see `Stream`
    with torch._C.DisableTorchFunction():
        return place.order(change(place.order(tokens)))


def _change_input(
    change: Callable[[Tensor], Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), options
    name, tokens = next(iter(options.items()))
    return args, options | {name: change(tokens)}


def _change_output(
    change: Callable[[Tensor], Tensor], module: nn.Module, args: Any, result: Any
) -> Any:
    tokens = change(first_output(result))
    return (tokens, *result[1:]) if isinstance(result, tuple) else tokens


# Findings about each module, with a description of it and its images. See `ModelReader.settle`.
_KEPT: WeakKeyDictionary[nn.Module, tuple[list[Any], _Findings]] = WeakKeyDictionary()
_KEPT_LOCK = threading.Lock()


def _describe(model: nn.Module, images: Images) -> list[Any]:
    """Return what changes when modules, their methods, hooks, settings or parameters are replaced:
    all that a check depends on but the values of the weights and of the images."""
    kind = images.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    described: list[Any] = [images.shape[1:], images.dtype, images.device, autocast]
    for name, module in model.named_modules(remove_duplicate=False):
        described += [name, ref(module), type(module).forward, id(module.__dict__.get("forward"))]
        # numbers that torch gives out once
        described += [*module._forward_hooks, *module._forward_pre_hooks]
        described += [key for key, parameter in module._parameters.items() if parameter is None]
        for key, value in module.__dict__.items():
            is_number = isinstance(value, bool | int | float | str) and key != "training"
            # a container may change and stay the same object
            if is_number or (isinstance(value, list | tuple | dict) and key[0] != "_"):
                described.append((key, repr(value)))
    return described


def _list_versions(model: nn.Module) -> tuple[int, ...]:
    """Return numbers of which one rises when a weight changes."""
    parameters = (*model.parameters(), *model.buffers())
    return tuple(0 if one.is_inference() else one._version for one in parameters)


def read_bundle(bundle: Bundle) -> ModelReader:
    """Return the reader of a bundle's model, always the same."""
    reader = bundle.find_once(ModelReader)
    reader.image_size = reader.image_size or bundle.preprocess.image_size
    return reader


def read_model(model: nn.Module | ModelReader, images: Tensor | None = None) -> ModelReader:
    """Return the reader of a model; a reader is returned as it is.

    Args:
        model: The model.
        images: Images for it, whose size it may not tell.
    """
    reader = model if isinstance(model, ModelReader) else ModelReader(model)
    if images is None:
        return reader
    if reader is not model:
        reader.recall(images)
    if reader.image_size is None:
        reader.channels, *size = images.shape[1:]
        height, width = size
        reader.image_size = (height, width)
    return reader
