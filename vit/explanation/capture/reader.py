"""The parts of a model that maps are read from, found once and kept."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vit.explanation.capture.discovery import (
    Discovered,
    Grid,
    LayerWatch,
    OnLayer,
    OnTokens,
    discover_layers,
    draw_noise,
    evaluation_mode,
)
from vit.model.averaged_model import AveragedModel
from vit.model.logits import compute_logits
from vit.model.model_info import unwrap_model
from vit.runtime.tensors import Images

# From more tokens than the first number on, the checks follow as many as the second, if the others
# can be left out: at 1,024 pixels a forward pass of a ViT-S takes 10 s of a CPU.
MANY_TOKENS, FEW_TOKENS = 1100, 256
# Maps of a model are read from one of these.
Source = Literal["attention", "feature map", "pixels"]


@dataclass
class _Findings:
    """Findings about a model, without its modules."""

    attention: Discovered | None = None
    refusal: str = ""  # why maps of its attention are refused
    drops_tokens: bool | None = None
    signs: Tensor | None = None  # mixture of the logits that measures the pooling, 1 or -1
    # which of the tokens that leave the last block and the modules after it are pooled
    pooled: int | None = None
    first_averaged: int | None = None  # first token of a mean that is pooled; -1 without a mean
    # description of the model and the images for which maps have passed the checks
    checked: list[Any] | None = None


_KEPT: WeakKeyDictionary[nn.Module, _Findings] = WeakKeyDictionary()


class ModelReader:
    """A model without its wrappers, for images like these, and the parts of it that maps need. Each
    is searched for when it is first needed. What an earlier reader of the module found is taken
    over if maps have passed their checks and nothing changed."""

    def __init__(self, model: nn.Module, images: Images) -> None:
        self.model = unwrap_model(model)
        self.image_shape = tuple(images.shape[1:])
        self._like = images[:0]
        self.found = _KEPT.get(self.model, _Findings())
        self.is_checked = self.found.checked == _describe(self.model, images)
        if not self.is_checked:
            self.found = _Findings()

    def keep(self, *, refusal: bool = False) -> None:
        """Note that maps have passed their checks, also for the next reader of the module; that
        attention is refused, for it with `refusal` alone: the reason may be the images."""
        self.is_checked = True
        if self.has_attention or refusal:
            self.found.checked = _describe(self.model, self._like)
            _KEPT[self.model] = self.found

    @property
    def attention(self) -> Discovered:
        """The attention layers. Raises ValueError if there are none that can be read."""
        found = self.found
        if found.attention is None and not found.refusal:
            try:
                if isinstance(self.model, AveragedModel):
                    raise ValueError("an average of models has no attention of its own")
                found.attention = discover_layers(self.model, self.image_shape)
            except ValueError as error:
                found.refusal = str(error)
        if found.attention is None or found.refusal:
            raise ValueError(found.refusal)
        return found.attention

    @property
    def has_attention(self) -> bool:
        """True if there are attention layers, and no check has refused them."""
        with suppress(ValueError):
            return bool(self.attention)
        return False

    @property
    def source(self) -> Source:
        if self.has_attention:
            return "attention"
        # models have no common feature map
        return "pixels" if isinstance(self.model, AveragedModel) else "feature map"

    def find_patches(self) -> tuple[int, Grid]:
        """Find the number of prefix tokens (class, registers, prompts: all that aren't patches) and
        the grid of the patches, which `check_attention` tests. Without a convolution, patches are
        taken to be squares. Raise ValueError if there are no such patches."""
        attention = self.attention
        _, height, width = self.image_shape
        num_tokens = attention.num_tokens[0]
        grids = list(attention.patch_grids)
        if not grids:
            for count in range(num_tokens, 0, -1):
                rows = max(round(math.sqrt(count * height / width)), 1)
                if count % rows == 0 and rows * rows * width == count * height:
                    grids.append((rows, count // rows))
        found = [grid for grid in grids if math.prod(grid) <= num_tokens]
        if not found or set(attention.num_tokens) != {num_tokens}:
            raise ValueError(
                f"{type(self.model).__name__} attends between {attention.num_tokens[-1]} tokens, "
                f"which are no patches of images of {height}×{width} pixels (are patches masked or "
                "merged, or are there branches?), so they have no place in a map"
            )
        return num_tokens - math.prod(found[0]), found[0]

    @property
    def can_drop_tokens(self) -> bool:
        """True if tokens can be left out of a forward pass: the model has attention, which doesn't
        get the positions of all patches (rotary embeddings, relative position biases)."""
        if self.found.drops_tokens is None:
            self.found.drops_tokens = self.has_attention and self._try_to_drop()
        return self.found.drops_tokens

    @torch.no_grad()
    def _try_to_drop(self) -> bool:
        """Leave some tokens out, and return whether the order of the others doesn't matter."""
        images = draw_noise((2, *self.image_shape), next(self.model.parameters()))

        def keep_half(turned_axes: tuple[int, ...], tokens: Tensor) -> Tensor:
            # no prefix tokens are in the second half
            first, second = tokens.tensor_split(2, dim=1)
            if tokens.shape[1] > MANY_TOKENS:
                first, second = first[:, :FEW_TOKENS], second[:, :FEW_TOKENS]
            return torch.cat([first, second[:, ::2].flip(turned_axes)], dim=1)

        logits = []
        with evaluation_mode(self.model):
            for turned_axes in ((), (1,)):
                try:
                    with self.change_tokens(partial(keep_half, turned_axes)):
                        logits.append(compute_logits(self.model, images))
                except (RuntimeError, IndexError, ValueError):  # a shape
                    return False
        error = (logits[1] - logits[0]).abs().max()
        # rounding changes plain models by up to 4e-7, and rotary positions by 2e-4 and more even
        # where random weights attend evenly (the models of the tests, five seeds)
        bound = max(2e-5, torch.finfo(images.dtype).eps)
        return bool(error <= bound * logits[0].abs().max())

    def change_tokens(
        self, change: Callable[[Tensor], Tensor]
    ) -> AbstractContextManager[LayerWatch]:
        """Let the first block read `change(tokens)` instead of the tokens [B, N, D], which include
        prefix tokens and have their positions."""
        return self.watch(lambda link, tokens: None if link else change(tokens))

    @contextmanager
    def watch(
        self, on_tokens: OnTokens, on_layer: OnLayer = lambda number, layer: None
    ) -> Iterator[LayerWatch]:
        """Watch forward passes."""
        watch = LayerWatch(self.attention, on_tokens, on_layer)
        first = self.model.get_submodule(self.attention.first)
        with first.register_forward_pre_hook(watch.begin), watch:
            yield watch


def _describe(model: nn.Module, images: Images) -> list[Any]:
    """Return all that a check depends on but the values of the images: it changes when modules,
    their methods, hooks, settings or weights do."""
    kind = images.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    described: list[Any] = [images.shape[1:], images.dtype, images.device, autocast]
    for name, module in model.named_modules(remove_duplicate=False):
        described += [name, ref(module), type(module).forward, id(module.__dict__.get("forward"))]
        # numbers that torch gives out once
        described += [*module._forward_hooks, *module._forward_pre_hooks]
        for key, weight in (*module._parameters.items(), *module._buffers.items()):
            described.append((key, id(weight)))
            # it rises with each change in place
            if weight is not None and not weight.is_inference():
                described.append(weight._version)
        for key, value in module.__dict__.items():
            is_number = isinstance(value, bool | int | float | str) and key != "training"
            # a container may change and stay the same object
            if is_number or (isinstance(value, list | tuple | dict) and key[0] != "_"):
                described.append((key, repr(value)))
    return described


def read_model(model: nn.Module | ModelReader, images: Images) -> ModelReader:
    """Return the reader of a model for images like these; a reader is returned as it is."""
    return model if isinstance(model, ModelReader) else ModelReader(model, images)
