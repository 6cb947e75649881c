"""The parts of a model that maps are read from, found once and kept."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.capture.discovery import Stream, StreamChanges, discover_layers
from vit.explanation.capture.layers import (
    AttentionLayer,
    LayerPlace,
    first_output,
)
from vit.model.logits import compute_logits
from vit.model.model_info import find_preprocess, keep_mode, unwrap_model
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.tensors import Images

# Sources of maps, the best first. Pixels need nothing but gradients.
Source = Literal["attention", "feature map", "pixels"]


class ModelReader:
    """A model and the parts of it that maps need. Each is searched for when it is first needed.

    `read_bundle` returns that of a bundle's model. Functions of this package
    take a reader, or a module, which they search on each call.

    Attributes:
        model: The model, without the wrappers of torch.compile, DistributedDataParallel and peft.
        image_size: Height and width of its images, once they are known.
        refused: Sources that a check has refused for this model, with the reason.
        is_recalled: True if an earlier reader of the same module has settled the source.
        feature_map: Number of the output that is its feature map, see `find_feature_map`. None:
            not searched for yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap_model(model)
        self.refused: dict[Source, str] = {}
        self.is_recalled = False
        # versions of the weights with which the source has passed its checks
        self._settled_versions: tuple[int, ...] | None = None
        self.feature_map: int | None = None
        self.image_size: tuple[int, int] | None = None
        self._found: list[LayerPlace] | ValueError | None = None
        self._stream: Stream | None = None

    @property
    def is_settled(self) -> bool:
        """True if the source has passed its checks with the weights that the model has now."""
        return self._settled_versions == _list_versions(self.model)

    def settle(self, images: Images) -> None:
        """Note that the source has passed its checks, and keep what was found for images of this
        size: `read_model` gives it to the next reader of the module.

        A refusal isn't kept. Its reason may be the images, or weights that training changes.
        """
        self._settled_versions = _list_versions(self.model)
        if self.refused or not isinstance(self._found, list):
            return
        values = dict(self.__dict__)
        del values["model"]
        # the module must not be kept alive
        values["_found"] = [
            place._replace(module=ref(place.module), block=ref(place.block))  # type: ignore[arg-type]
            for place in self._found
        ]
        # a model with an equality of its own can't be a key
        with _KEPT_LOCK, suppress(TypeError):
            _KEPT[self.model] = (_describe(self.model, images), values)

    def _recall(self, images: Images) -> None:
        """Take over what an earlier reader has kept, if the model is as it was."""
        with _KEPT_LOCK, suppress(TypeError):
            description, values = _KEPT.get(self.model, (None, {}))
            if description != _describe(self.model, images):
                return
            self.__dict__.update(values, refused={})
            self._found = [
                place._replace(module=place.module(), block=place.block())
                for place in values["_found"]
            ]
            self.is_recalled = self.is_settled

    def forget(self) -> None:
        """Forget what checks have found, because the weights have changed."""
        self.refused.clear()
        self.feature_map = None
        self.__dict__.pop("_has_positions", None)
        if isinstance(self._found, ValueError):
            self._found = None

    @property
    def _places(self) -> list[LayerPlace] | ValueError:
        if self._found is None:
            try:
                self._found = self._discover()
            except ValueError as error:
                if not self.has_known_size:  # the size may be known later
                    return error
                self._found = error
        return self._found

    @property
    def has_known_size(self) -> bool:
        """True if the size of the images is known, or the model tells it."""
        if self.image_size is None:
            try:
                height, width = find_preprocess(self.model)["image_size"]
            except ValueError:
                return False
            self.image_size = (height, width)
        return True

    def _discover(self) -> list[LayerPlace]:
        if not self.has_known_size:
            raise ValueError(
                f"the size of the images of {type(self.model).__name__} is unknown, and its "
                "attention is found by running it; give preprocess=vit.Preprocess(image_size=…)"
            )
        assert self.image_size is not None
        places, self._stream = discover_layers(self.model, self.image_size)
        return places

    @property
    def has_attention(self) -> bool:
        """True if there are attention layers, and no check has refused them."""
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
        """The attention layers, in order. Raises ValueError if there are none that can be read."""
        if isinstance(self._places, ValueError):
            raise ValueError(str(self._places))
        return self._places

    def leave_out_unseen(self, image: Images) -> bool:
        """Leave out the layers that don't run, or read the same for two images, such as those of
        the texts of CLIP.

        Args:
            image: A normalised image.

        Returns:
            True if some are left out and others stay.
        """
        passes: list[dict[int, Tensor]] = []
        with ExitStack() as stack:
            stack.enter_context(keep_mode(self.model))
            self.model.eval()
            for number, place in enumerate(self.places):

                def keep_input(
                    module: nn.Module, args: tuple[Any, ...], number: int = number
                ) -> None:
                    passes[-1][number] = args[0]

                stack.callback(place.block.register_forward_pre_hook(keep_input).remove)
            with torch.no_grad():
                for pixels in (image, -image):
                    passes.append({})
                    compute_logits(self.model, pixels)
        first, second = passes
        seen = [
            place
            for number, place in enumerate(self.places)
            if number in first and not torch.equal(first[number], second[number])
        ]
        if not 0 < len(seen) < len(self.places):
            return False
        self._found = seen
        return True

    def build_layers(self) -> list[AttentionLayer]:
        """Build an object for each attention layer, in order, that records one forward pass."""
        return list(map(AttentionLayer, self.places))

    @property
    def stream(self) -> Stream | None:
        """Where the tokens of a discovered model are if its blocks don't add their own results."""
        return self._stream if self.places else None

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
        return not (self.is_ours or self._try_to_drop())

    def _try_to_drop(self) -> bool:
        """Leave some tokens out, and return whether the order of the others doesn't matter."""
        assert self.image_size is not None
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, 3, *self.image_size, generator=generator)
        images = images.to(next(self.model.parameters()))

        logits = []
        with keep_mode(self.model), torch.no_grad():
            self.model.eval()
            for select in (_keep_half, _turn_half):
                try:
                    with self.change_tokens(select):
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
        place = self.places[0]
        if self.stream is not None:
            with StreamChanges(self.stream, {self.stream.inputs[0]: change}):
                yield
            return

        def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (place.order(change(place.order(args[0]))), *args[1:])

        # the position embedding is added before the first block
        with place.block.register_forward_pre_hook(replace):
            yield

    @contextmanager
    def change_last_tokens(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let `change(tokens)` leave the last block instead of the tokens [B, N, D]."""
        place = self.places[-1]
        if self.stream is not None:
            with StreamChanges(self.stream, {self.stream.last: change}):
                yield
            return

        def replace(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            tokens = place.order(change(place.order(first_output(result))))
            return (tokens, *result[1:]) if isinstance(result, tuple) else tokens

        with place.block.register_forward_hook(replace):
            yield


# Findings about each module, with a description of it and its images. See `ModelReader.keep`.
_KEPT: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Mapping[str, Any]]] = WeakKeyDictionary()
_KEPT_LOCK = threading.Lock()


def _describe(model: nn.Module, images: Images) -> tuple[Any, ...]:
    """Return what changes when modules, their methods, hooks, settings or parameters are replaced:
    all that a check depends on but the values of the weights and of the images."""
    modules = [
        (
            name,
            ref(module),
            type(module).forward,
            id(module.__dict__.get("forward")),
            # numbers that torch gives out once
            *module._forward_hooks,
            *module._forward_pre_hooks,
            *(part for part in module._parameters.items() if part[1] is None),
            *(
                setting
                for setting in module.__dict__.items()
                if setting[0] != "training" and isinstance(setting[1], bool | int | float | str)
            ),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    kind = images.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return modules, images.shape[1:], images.dtype, images.device, autocast


def _list_versions(model: nn.Module) -> tuple[int, ...]:
    """Return numbers of which one rises when a weight changes."""
    parameters = (*model.parameters(), *model.buffers())
    return tuple(0 if one.is_inference() else one._version for one in parameters)


def _keep_half(tokens: Tensor) -> Tensor:
    """Leave out every other token of the second half, where no prefix tokens are."""
    first, second = tokens.tensor_split(2, dim=1)
    return torch.cat([first, second[:, ::2]], dim=1)


def _turn_half(tokens: Tensor) -> Tensor:
    first, second = tokens.tensor_split(2, dim=1)
    return torch.cat([first, second[:, ::2].flip(1)], dim=1)


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
        reader._recall(images)
    if reader.image_size is None:
        height, width = images.shape[-2:]
        reader.image_size = (height, width)
    return reader
