"""Find the attention layers of a model of any code: run it once, and see what attends and to which
tokens each attention is added.

Tokens are known by their place in the pass, see `ForwardWatch`.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.capture.tokens import Grid, draw_noise
from vit.explanation.capture.watch import ForwardWatch, has_three_axes
from vit.model.logits import at_least_float32, compute_logits
from vit.model.model_info import keep_mode
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.tensors import Images, Logits

_BATCH = 2
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_COPIES = {torch.clone, Tensor.clone}
# function from the number of a link between blocks and its tokens [B, N, D] to other tokens, or None
ChangeTokens = Callable[[int, Tensor], Tensor | None]


class Discovered(NamedTuple):
    """The attention layers of a model, see `ForwardWatch` for the numbers.

    Attributes:
        num_tokens: For each layer in which all tokens attend to each other, their number.
        attentions: Numbers of the layers' attentions; last that of a few queries that attend to the
            tokens after them, if there is one.
        links: Number of the result that enters each layer's block, and of the one that leaves the
            last.
        axes: Order of the axes that makes these [batch, tokens, channels], and back.
        first: Name of the first module with weights that runs, with which a pass begins: a model's
            parts may be called without the model.
        patch_grids: Rows and columns of convolutions that make patches from pixels.
    """

    num_tokens: list[int]
    attentions: list[int]
    links: list[int]
    axes: tuple[int, int, int]
    first: str
    patch_grids: set[Grid]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.num_tokens)


class LayerWatch(ForwardWatch):
    """Context that passes the tokens of each link to `change`, and each layer to `keep`, with their
    places in the lists of `Discovered`."""

    def __init__(
        self,
        discovered: Discovered,
        change: ChangeTokens,
        keep: Callable[[int, AttentionLayer], None] | None = None,
        mixing: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.links = {result: link for link, result in enumerate(discovered.links)}
        self.layers = {number: place for place, number in enumerate(discovered.attentions)}
        self.axes = discovered.axes
        self.change = change
        self.keep = keep
        mixing = mixing or {}
        super().__init__(mixing={discovered.attentions[place]: mixing[place] for place in mixing})
        if discovered.first:  # nothing before it is counted
            self.num_results = self.num_attentions = -sys.maxsize

    def see_attention(self, layer: AttentionLayer) -> None:
        """Pass a layer on."""
        place = self.layers.get(self.num_attentions)
        if place is not None and self.keep is not None:
            self.keep(place, layer)

    def see_result(self, result: Tensor) -> Tensor:
        """Pass tokens on."""
        link = self.links.get(self.num_results)
        if link is None:
            return result
        tokens = result.permute(self.axes)
        if link == 0:
            self.batch, self.num_tokens = tokens.shape[:2]
        changed = self.change(link, tokens)
        if changed is None:
            return result
        # an addition in place would change the tokens that are kept
        return changed.permute(self.axes).clone()


class _Seen(NamedTuple):
    """One attention in a forward pass."""

    number: int
    num_queries: int
    num_tokens: int
    time: int  # number of results before its own


class _Discovery(ForwardWatch):
    """Context that lists every attention, the additions and the grids of patches of a pass. No
    tensor is kept: each carries its number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(_BATCH)
        self.model = model
        self.first: nn.Module | None = None  # the first module with weights that runs
        self.seen: list[_Seen] = []
        # shape and number of a result, and numbers of its terms
        self.additions: list[tuple[torch.Size, int, list[int]]] = []
        self.patch_grids: set[Grid] = set()

    def on_entry(self, module: nn.Module, args: object) -> None:
        """Note where a pass begins."""
        has_weights = next(module.parameters(), None) is not None
        if self.first is None and has_weights and module is not self.model:
            self.first = module
        if module is self.first:
            self.begin()
            self.additions.clear()

    def on_convolution(self, module: nn.Conv2d, args: tuple[Tensor], patches: Tensor) -> None:
        """Note the grid of patches that don't overlap."""
        if module.kernel_size == module.stride:
            self.patch_grids.add((patches.shape[-2], patches.shape[-1]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # an addition in place changes its first term
        numbers = []
        if func in _ADDITIONS and all(map(has_three_axes, args[:2])):
            numbers = [_find_number(term) for term in args[:2] if term.shape == args[0].shape]
        time = self.num_results
        result = super().__torch_function__(func, types, args, kwargs)
        if func in _COPIES and has_three_axes(args[0]):
            result.vit_number = (_find_number(args[0]), result._version)
        if len(numbers) == 2:
            self.additions.append((result.shape, time, numbers))
        return result

    def see_result(self, result: Tensor) -> Tensor:
        """Give a tensor its number."""
        # a function may return its argument as it is
        if _find_number(result) < 0:
            result.vit_number = (self.num_results, result._version)  # type: ignore[attr-defined]
        return result

    def see_attention(self, layer: AttentionLayer) -> None:
        """Note an attention of the images; texts have another batch."""
        batch, _, num_queries, num_tokens = layer.shape
        if num_queries == num_tokens:  # then a few queries alone, as of a pooling, are seen, too
            self.num_tokens = num_tokens
        if batch == _BATCH:
            seen = _Seen(self.num_attentions, num_queries, num_tokens, self.num_results)
            self.seen.append(seen)

    def find_links(self, layers: list[_Seen]) -> tuple[list[int], torch.Size]:
        """Find the tokens to which each attention is added, and the last tokens of their shape.
        There are fewer if one isn't added to tokens that it reads."""
        links = []
        found = torch.Size()
        for seen in layers:
            for shape, number, terms in self.additions:
                before = [term for term in terms if 0 <= term < seen.time]
                if number >= seen.time and len(before) == 1:
                    links += before
                    found = shape
                    break
        links += [number for shape, number, _ in self.additions if shape == found][-1:]
        return links, found


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
        ValueError: No attention between all tokens is seen, or not to which tokens one is added.
    """
    family = type(model).__name__
    images = draw_noise((1, *image_shape), next(model.parameters())).repeat(_BATCH, 1, 1, 1)
    watch = _Discovery(model)
    with ExitStack() as stack:
        stack.enter_context(keep_mode(model))
        stack.enter_context(run_as_written())
        model.eval()
        try:
            run_whole(model, images[:1])  # it may keep what it computes in its first pass
            for module in model.modules():
                stack.enter_context(module.register_forward_pre_hook(watch.on_entry))
                if isinstance(module, nn.Conv2d) and module.in_channels == image_shape[0]:
                    stack.enter_context(module.register_forward_hook(watch.on_convolution))
            with watch:
                run_whole(model, images)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            raise ValueError(
                f"no attention of {family} can be read on images of the shape {image_shape}: "
                f"{error or repr(error)}"
            ) from error

    layers = [seen for seen in watch.seen if seen.num_queries == seen.num_tokens]
    if not layers:
        raise ValueError(
            f"{family} has no attention between all of its tokens that torch's functions or a "
            "softmax compute"
        )
    links, shape = watch.find_links(layers)
    is_chain = len(links) > len(layers) and links == sorted(set(links))
    if not is_chain or set(shape[:2]) != {_BATCH, layers[-1].num_tokens}:
        raise ValueError(
            f"an attention of {family} isn't added once and alone to tokens [batch, tokens, "
            "channels] that it reads (no residual connection, two attentions in one block, "
            "test-time augmentation?), so no map shows it"
        )
    pools = [seen for seen in watch.seen[-1:] if seen not in layers]
    names = {module: name for name, module in model.named_modules()}
    return Discovered(
        num_tokens=[seen.num_tokens for seen in layers],
        attentions=[seen.number for seen in layers + pools],
        links=links,
        axes=(0, 1, 2) if shape[0] == _BATCH else (1, 0, 2),
        first=names.get(watch.first, ""),
        patch_grids=watch.patch_grids,
    )


def run_whole(model: nn.Module, images: Images) -> Logits:
    """Run a model so that each layer computes all of its tokens; the last block of this project's
    model can leave some out."""
    if not isinstance(model, VisionTransformer):
        return compute_logits(model, images)
    tokens = model.forward_features(images)
    with torch.autocast(images.device.type, enabled=False):
        return at_least_float32(model.forward_head(tokens.to(next(model.parameters()).dtype)))


@contextmanager
def run_as_written() -> Iterator[None]:
    """Let modules run as they are written: without the code that torch.compile makes of them, and
    without the fast path of `nn.TransformerEncoderLayer`. Neither can be watched."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        # nothing is compiled before the compiler is imported, which takes a second
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
