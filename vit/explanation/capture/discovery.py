"""Find the attention layers of a model of any code: run it once and see what attends."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit.explanation.capture.layers import (
    LayerPlace,
    run_as_written,
    without_fast_path,
)
from vit.explanation.capture.watch import AttentionCall, AttentionWatch, UnreadableError
from vit.model.logits import compute_logits
from vit.model.model_info import keep_mode
from vit.model.vision_transformer import VisionTransformer

_BATCH = 2
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
# from the number of a result to a change of it
Changes = Mapping[int, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Stream:
    """Where a model that adds its attention outside of modules keeps its tokens: results of torch's
    functions with the shape of the tokens, counted in a forward pass.

    Attributes:
        shape: Number of tokens and their width.
        inputs: Number of the result that enters each block.
        last: Number of the result that leaves the last block.
    """

    shape: tuple[int, int]
    inputs: tuple[int, ...]
    last: int


class StreamChanges(TorchFunctionMode):
    """Context that changes some of the tokens of a forward pass."""

    def __init__(self, stream: Stream, changes: Changes) -> None:
        super().__init__()
        self.stream = stream
        self.changes = changes
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_result(result, self.stream.shape):
            change = self.changes.get(self.count)
            self.count += 1
            if change is not None:
                # a change is no function of the model: other contexts must not count it
                with torch._C.DisableTorchFunction():
                    return change(result)
        return result


def _is_result(result: object, shape: tuple[int, int]) -> bool:
    return isinstance(result, Tensor) and result.ndim == 3 and tuple(result.shape[1:]) == shape


@dataclass
class _Seen:
    """One attention in a forward pass."""

    path: tuple[nn.Module, ...]  # modules that compute it, outermost first
    num_heads: int
    num_tokens: int
    time: int  # number of results before its weights


class _Discovery(AttentionWatch):
    """Context that lists every self-attention, the results and the additions of a pass."""

    def __init__(self) -> None:
        super().__init__(_BATCH, self._see)
        self.stack: list[nn.Module] = []
        self.seen: list[_Seen] = []
        self.results: list[Tensor] = []
        # by the number of the result, the two terms of an addition
        self.operands: dict[int, tuple[Tensor, ...]] = {}
        self._begin: tuple[tuple[nn.Module, ...], int] = ((), 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._weights
        # a fused function has its weights and its product at one time
        now = (tuple(self.stack), len(self.results))
        result = super().__torch_function__(func, types, args, kwargs)
        if self._weights is not before:
            self._begin = now
        if isinstance(result, Tensor) and result.ndim == 3:
            shapes = [getattr(term, "shape", None) for term in args[:2]]
            if func in _ADDITIONS and shapes.count(result.shape) == len(shapes):
                self.operands[len(self.results)] = args[:2]
            self.results.append(result)
        return result

    def _see(self, call: AttentionCall) -> None:
        path, time = tuple(self.stack), len(self.results)
        if call.weights is not None:  # the softmax may be computed in another module
            begin, time = self._begin
            path = path[: sum(one is other for one, other in zip(path, begin, strict=False))]
        # another batch is that of texts
        if call.num_queries == call.value.shape[2] and len(call.value) == _BATCH:
            self.seen.append(_Seen(path, call.value.shape[1], call.num_queries, time))


def discover_layers(
    model: nn.Module, image_size: tuple[int, int]
) -> tuple[list[LayerPlace], Stream | None]:
    """Run a model on noise and find its attention layers, in order.

    Returns:
        The layers; and the stream of tokens if it isn't the input and output of modules.

    Raises:
        ValueError: No attention between all tokens is seen, or where its tokens are isn't.
    """
    family = type(model).__name__
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_BATCH, 3, *image_size, generator=generator).to(parameter)
    names = {module: name for name, module in model.named_modules()}
    tokens: dict[nn.Module, tuple[Any, Any]] = {}  # first input and output of each module
    watch = _Discovery()

    def on_entry(module: nn.Module, args: tuple[Any, ...]) -> None:
        watch.stack.append(module)

    def on_exit(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if watch.stack and watch.stack[-1] is module:
            watch.stack.pop()
        if isinstance(result, tuple) and result:
            result = result[0]
        tokens[module] = (next(iter(args), None), result)

    with ExitStack() as stack:
        stack.enter_context(keep_mode(model))
        stack.enter_context(torch.no_grad())
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
            raise ValueError(
                f"no attention can be read in {family}, because it doesn't run on images of "
                f"{image_size[0]}×{image_size[1]} pixels: {error}"
            ) from error

    if not watch.seen:
        raise ValueError(
            f"{family} has no attention between all of its tokens that torch's functions or a "
            "softmax compute"
        )
    counts = Counter(module for seen in watch.seen for module in set(seen.path))
    places = []
    for seen in watch.seen:
        blocks = [
            module
            for module in seen.path
            if counts[module] == 1 and _takes_tokens(*tokens[module], seen.num_tokens)
        ]
        if not blocks:
            raise ValueError(
                f"an attention of {family} isn't part of a module that takes and gives all tokens "
                "[batch, tokens, channels], so where they are isn't known"
            )
        block = blocks[0]
        place = LayerPlace(
            names[seen.path[-1]],
            seen.path[-1],
            block,
            num_heads=seen.num_heads,
            tokens_first=tokens[block][0].shape[1] == _BATCH != seen.num_tokens,
        )
        places.append(place)

    # blocks that add what they compute follow one another
    joined = [tokens[one.block][1] is tokens[other.block][0] for one, other in pairwise(places)]
    if joined and all(joined):
        return places, None
    if any(place.tokens_first for place in places):
        raise ValueError(
            f"{family} has tokens [tokens, batch, channels] outside of its blocks; put each "
            "attention with its addition into a module"
        )
    return places, _find_stream(family, watch)


def run_whole(model: nn.Module, images: Tensor) -> None:
    """Run a model so that each layer computes all of its tokens; the last block of this project's
    model can leave some out."""
    if isinstance(model, VisionTransformer):
        model.forward_head(model.forward_features(images))
    else:
        compute_logits(model, images)


def _find_stream(family: str, watch: _Discovery) -> Stream:
    """Find the tokens to which each attention is added."""
    inputs = []
    for seen in watch.seen:
        earlier = {id(result): number for number, result in enumerate(watch.results[: seen.time])}
        added = next((terms for n, terms in watch.operands.items() if n >= seen.time), ())
        before = [earlier[id(term)] for term in added if id(term) in earlier]
        if len(before) != 1:
            raise ValueError(f"an attention of {family} isn't added to the tokens it reads")
        inputs += before
    _, num_tokens, width = watch.results[inputs[0]].shape
    shape = (num_tokens, width)

    def count(number: int) -> int:
        return sum(_is_result(result, shape) for result in watch.results[:number])

    return Stream(shape, tuple(map(count, inputs)), count(max(watch.operands)))


def _takes_tokens(tokens: object, output: object, num_tokens: int) -> bool:
    """Return whether a module takes and gives [batch, tokens, channels] or [tokens, batch,
    channels]."""
    if not isinstance(tokens, Tensor) or not isinstance(output, Tensor) or tokens.ndim != 3:
        return False
    return output.shape == tokens.shape and set(tokens.shape[:2]) == {_BATCH, num_tokens}
