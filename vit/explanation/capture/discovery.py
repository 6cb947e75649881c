"""Find the attention layers of a model of any code: run it once and see what attends."""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit.explanation.capture.layers import (
    LayerPlace,
    run_as_written,
    without_fast_path,
)
from vit.explanation.capture.watch import AttentionCall, AttentionWatch, UnreadableError
from vit.model.logits import at_least_float32, compute_logits
from vit.model.model_info import keep_mode
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.tensors import Images, Logits

_BATCH = 2
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
# function from the number of a link between blocks and its tokens [B, N, D] to other tokens
ChangeTokens = Callable[[int, Tensor], Tensor]


class Stream(NamedTuple):
    """Where a model that adds its attention outside of modules keeps its tokens: results of torch's
    functions with the shape of the tokens, counted in a forward pass.

    Attributes:
        shape: Number of tokens and their width.
        results: Number of the result that enters each block, and of the one that leaves the last.
    """

    shape: tuple[int, ...]
    results: tuple[int, ...]


class StreamChanges(TorchFunctionMode):
    """Context that changes the tokens of a forward pass."""

    def __init__(self, stream: Stream, change: ChangeTokens) -> None:
        super().__init__()
        self.shape = stream.shape
        self.links = {result: link for link, result in enumerate(stream.results)}
        self.change = change
        self.count = 0

    def begin(self, *_: object) -> None:
        """Begin a forward pass."""
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_tokens(result) or result.shape[1:] != self.shape:
            return result
        link = self.links.get(self.count)
        self.count += 1
        if link is None:
            return result
        # a change is no function of the model: other contexts must not count it
        with torch._C.DisableTorchFunction():
            # an addition in place would change the tokens that are kept
            return self.change(link, result).clone()


class Discovered(NamedTuple):
    """The attention layers of a model in order.

    Attributes:
        layers: Layers in which all tokens attend to each other.
        pool: Layer after them in which a few queries attend to the tokens, if there is one.
        stream: Where the tokens are if they aren't the input and output of the blocks.
    """

    layers: list[LayerPlace]
    pool: LayerPlace | None
    stream: Stream | None


@dataclass
class _Seen:
    """One attention in a forward pass."""

    path: tuple[nn.Module, ...]  # modules that compute it, outermost first
    num_heads: int
    num_queries: int
    num_tokens: int
    time: int  # number of results before its weights
    is_alike: bool  # the two images, which are the same, have the same values


class _Discovery(AttentionWatch):
    """Context that lists every attention, the shapes of the results and the additions of a pass. No
    tensor is kept: each is known by a number that it carries."""

    def __init__(self) -> None:
        super().__init__(_BATCH, self._see)
        self.stack: list[nn.Module] = []
        self.seen: list[_Seen] = []
        self.shapes: list[tuple[int, ...]] = []
        # number of the result, and of its terms
        self.additions: list[tuple[int, list[int]]] = []
        self._begin: tuple[tuple[nn.Module, ...], int] = ((), 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._weights
        # a fused function has its weights and its product at one time
        now = (tuple(self.stack), len(self.shapes))
        terms = []
        if func in _ADDITIONS and all(map(_is_tokens, args[:2])):
            terms = [(_find_number(term), term.shape) for term in args[:2]]
        result = super().__torch_function__(func, types, args, kwargs)
        if self._weights is not before:
            self._begin = now
        if _is_tokens(result):
            number = len(self.shapes)
            if terms and all(shape == result.shape for _, shape in terms):
                self.additions.append((number, [term for term, _ in terms]))
            # a function may return its argument as it is
            if _find_number(result) < 0:
                result.vit_number = (number, result._version)
            self.shapes.append(tuple(result.shape[1:]))
        return result

    def _see(self, call: AttentionCall) -> None:
        path, time = tuple(self.stack), len(self.shapes)
        if call.weights is not None:  # the softmax may be computed in another module
            begin, time = self._begin
            path = path[: sum(one is other for one, other in zip(path, begin, strict=False))]
        _, num_heads, num_tokens, _ = call.value.shape
        if len(call.value) == _BATCH:
            first, second = call.value.float()
            is_alike = torch.allclose(first, second, atol=1e-3)
            seen = _Seen(path, num_heads, call.num_queries, num_tokens, time, is_alike)
            self.seen.append(seen)


def _is_tokens(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 3


def _find_number(tensor: Tensor) -> int:
    """Return the number that a tensor carries; a negative one if it has none, or was changed in
    place since."""
    number, version = getattr(tensor, "vit_number", (-1, 0))
    return number if version == tensor._version else -1


@torch.inference_mode(False)
@torch.no_grad()
def discover_layers(model: nn.Module, image_shape: tuple[int, int, int]) -> Discovered:
    """Run a model on noise and find its attention layers, in order.

    Args:
        model: A model.
        image_shape: Channels, height and width of its images.

    Raises:
        ValueError: No attention between all tokens is seen, or where its tokens are isn't.
    """
    family = type(model).__name__
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, *image_shape, generator=generator).to(next(model.parameters()))
    images = image.repeat(_BATCH, 1, 1, 1)
    names = {module: name for name, module in model.named_modules()}
    # shape and number of the first input and output of each module
    entered: dict[nn.Module, tuple[torch.Size, int]] = {}
    left: dict[nn.Module, tuple[torch.Size, int]] = {}
    outside = itertools.count(2)
    watch = _Discovery()

    def describe(tensor: Any) -> tuple[torch.Size, int]:
        if not _is_tokens(tensor):
            return torch.Size(), -1
        # code that torch's functions don't tell of has made it
        if not hasattr(tensor, "vit_number"):
            tensor.vit_number = (-next(outside), tensor._version)
        return tensor.shape, _find_number(tensor)

    def on_entry(module: nn.Module, args: tuple[Any, ...]) -> None:
        watch.stack.append(module)
        entered[module] = describe(next(iter(args), None))

    def on_exit(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if watch.stack and watch.stack[-1] is module:
            watch.stack.pop()
        left[module] = describe(result[0] if isinstance(result, tuple) and result else result)

    with ExitStack() as stack:
        stack.enter_context(keep_mode(model))
        stack.enter_context(without_fast_path())
        stack.enter_context(run_as_written())
        for module in names:
            stack.callback(module.register_forward_pre_hook(on_entry).remove)
            stack.callback(module.register_forward_hook(on_exit, always_call=True).remove)
        model.eval()
        try:
            with watch:
                run_whole(model, images)
        except UnreadableError as error:
            raise ValueError(f"no attention of {family} can be read: {error}") from error
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            _, height, width = image_shape
            raise ValueError(
                f"no attention can be read in {family}, because it doesn't run on images of "
                f"{height}×{width} pixels: {error}"
            ) from error

    # texts have another batch, or differ
    seen_calls = [seen for seen in watch.seen if seen.is_alike] or watch.seen
    seen_layers = [seen for seen in seen_calls if seen.num_queries == seen.num_tokens]
    if not seen_layers:
        raise ValueError(
            f"{family} has no attention between all of its tokens that torch's functions or a "
            "softmax compute"
        )
    counts = Counter(module for seen in seen_layers for module in set(seen.path))
    places = []
    blocks = []
    for seen in seen_layers:
        takers = (
            module
            for module in seen.path
            if counts[module] == 1
            and entered[module][0] == left[module][0]
            and set(left[module][0][:2]) == {_BATCH, seen.num_tokens}
        )
        block = next(takers, None)
        if block is None:
            raise ValueError(
                f"an attention of {family} isn't part of a module that takes and gives all tokens "
                "[batch, tokens, channels], so where they are isn't known"
            )
        is_turned = left[block][0][1] == _BATCH != seen.num_tokens
        blocks.append(block)
        places.append(
            LayerPlace(names[seen.path[-1]], names[block], seen.num_heads, tokens_first=is_turned)
        )
    pool = None
    last = seen_calls[-1]
    if last.num_queries < last.num_tokens:
        pool = LayerPlace(names[last.path[-1]], places[-1].block, last.num_heads)

    # blocks that add what they compute follow one another
    joined = [left[one][1] == entered[other][1] != -1 for one, other in pairwise(blocks)]
    if joined and all(joined):
        return Discovered(places, pool, None)
    if any(place.tokens_first for place in places):
        raise ValueError(
            f"{family} has tokens [tokens, batch, channels] outside of its blocks; put each "
            "attention with its addition into a module"
        )
    return Discovered(places, pool, _find_stream(family, watch, seen_layers))


def run_whole(model: nn.Module, images: Images) -> Logits:
    """Run a model so that each layer computes all of its tokens; the last block of this project's
    model can leave some out."""
    if not isinstance(model, VisionTransformer):
        return compute_logits(model, images)
    tokens = model.forward_features(images)
    with torch.autocast(images.device.type, enabled=False):
        return at_least_float32(model.forward_head(tokens.to(next(model.parameters()).dtype)))


def _find_stream(family: str, watch: _Discovery, layers: list[_Seen]) -> Stream:
    """Find the tokens to which each attention is added."""
    numbers = []
    for seen in layers:
        added = next((terms for n, terms in watch.additions if n >= seen.time), [])
        before = [term for term in added if 0 <= term < seen.time]
        if len(before) != 1:
            raise ValueError(f"an attention of {family} isn't added to the tokens it reads")
        numbers += before
    numbers.append(watch.additions[-1][0])
    shape = watch.shapes[numbers[0]]
    return Stream(shape, tuple(watch.shapes[:number].count(shape) for number in numbers))
