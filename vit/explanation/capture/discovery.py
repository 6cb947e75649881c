"""Find the attention layers of a model of any code: run it once, and see what attends and to which
tokens each attention is added. Tokens are known by their number in the pass, see `ForwardWatch`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.explanation.capture.watch import AttentionLayer, ForwardWatch, has_three_axes
from vit.model.logits import at_least_float32, compute_logits
from vit.model.model_info import keep_mode
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.tensors import Images, Logits

Grid = tuple[int, int]  # (rows, columns) of patches

_BATCH = 2
_ADDITIONS = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__}
_COPIES = {torch.clone, Tensor.clone}
# Called with the number of each link from 0 on, and its tokens [B, N, D]: those that enter each
# block, and at last those that leave the last one. The model goes on with a result that isn't None.
OnTokens = Callable[[int, Tensor], Tensor | None]
# Called with the number of each layer, and at last of a pooling, and the layer. The model goes on
# with a result [B, H, N, K] that isn't None instead of A·V.
OnLayer = Callable[[int, AttentionLayer], Tensor | None]


class Discovered(NamedTuple):
    """The attention layers of a model, see `ForwardWatch` for the numbers."""

    # for each layer in which all tokens attend to each other, their number
    num_tokens: list[int]
    # numbers of the layers' attentions; the last may be that of a few queries after the layers
    attentions: list[int]
    # results that enter each layer's block, and the one that leaves the last
    links: list[int]
    # order of their axes that makes them [batch, tokens, channels], and back
    axes: tuple[int, int, int]
    # first module with weights that runs: a model's parts may be called without the model
    first: str
    # rows and columns of patches that convolutions make from pixels
    patch_grids: set[Grid]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.num_tokens)


class LayerWatch(ForwardWatch):
    """Context that passes on the tokens of each link and each layer."""

    def __init__(self, discovered: Discovered, on_tokens: OnTokens, on_layer: OnLayer) -> None:
        super().__init__()
        self.discovered = discovered
        self.on_tokens = on_tokens
        self.on_layer = on_layer
        # nothing before the first module is counted
        self.num_results = self.num_attentions = -sys.maxsize

    def see_attention(self, layer: AttentionLayer) -> Tensor:
        """Pass a layer on."""
        heads = None
        if self.num_attentions in self.discovered.attentions:
            heads = self.on_layer(self.discovered.attentions.index(self.num_attentions), layer)
        return layer.output if heads is None else layer.restore(heads)

    def see_result(self, result: Tensor) -> Tensor:
        """Pass tokens on."""
        axes, links = self.discovered.axes, self.discovered.links
        if self.num_results not in links:
            return result
        tokens = result.permute(axes)
        if self.num_results == links[0]:
            self.batch, self.num_tokens = tokens.shape[:2]
        changed = self.on_tokens(links.index(self.num_results), tokens)
        # an addition in place would change the tokens that are kept
        return result if changed is None else changed.permute(axes).clone()


@dataclass
class _Seen:
    """One attention in a forward pass, and the tokens to which it is added."""

    number: int
    num_queries: int
    num_tokens: int
    time: int  # number of results before its output
    link: int = -1
    shape: tuple[int, ...] = ()


class _Discovery(ForwardWatch):
    """Context that lists the attentions, the additions and the grids of patches of a pass. No tensor
    is kept: each carries its number."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(_BATCH)
        self.num_channels = num_channels
        self.first = ""
        self.seen: list[_Seen] = []
        self.last_additions: dict[tuple[int, ...], int] = {}
        self.patch_grids: set[Grid] = set()

    def on_entry(self, name: str, *_: object) -> None:
        """Note where a pass begins."""
        self.first = self.first or name
        if name == self.first:
            self.begin()

    def on_convolution(self, module: nn.Conv2d, args: tuple[Tensor], patches: Tensor) -> None:
        """Note the grid of patches that don't overlap."""
        if module.in_channels == self.num_channels and module.kernel_size == module.stride:
            self.patch_grids.add((patches.shape[-2], patches.shape[-1]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # before the call, because an addition in place changes its first term
        numbers = []
        if func in _ADDITIONS and all(map(has_three_axes, args[:2])):
            numbers = [_find_number(term) for term in args[:2] if term.shape == args[0].shape]
        time = self.num_results
        result = super().__torch_function__(func, types, args, kwargs)
        if func in _COPIES and has_three_axes(args[0]):
            result.vit_number = (_find_number(args[0]), result._version)
        if len(numbers) == 2:
            self.last_additions[result.shape] = time
            for seen in self.seen:
                read = [number for number in numbers if 0 <= number < seen.time]
                if seen.link < 0 and len(read) == 1:
                    seen.link, seen.shape = read[0], result.shape
        return result

    def see_result(self, result: Tensor) -> Tensor:
        """Give a tensor its number."""
        # a function may return its argument as it is
        if _find_number(result) < 0:
            result.vit_number = (self.num_results, result._version)  # type: ignore[attr-defined]
        return result

    def see_attention(self, layer: AttentionLayer) -> Tensor:
        """Note an attention of the images; texts have another batch."""
        batch, _, num_queries, num_tokens = layer.shape
        if num_queries == num_tokens:  # later, the few queries of a pooling are seen, too
            self.num_tokens = num_tokens
        if batch == _BATCH:
            seen = _Seen(self.num_attentions, num_queries, num_tokens, self.num_results)
            self.seen.append(seen)
        return layer.output


def _find_number(tensor: Tensor) -> int:
    """Return the number that a tensor carries; a negative one if it has none, or was changed in
    place since."""
    number, version = getattr(tensor, "vit_number", (-1, 0))
    return number if version == tensor._version else -1


def draw_noise(
    shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw normally distributed numbers, the same ones at each call without a generator, with the
    type and device of `like`."""
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like)


@torch.inference_mode(False)
@torch.no_grad()
def discover_layers(model: nn.Module, image_shape: tuple[int, ...]) -> Discovered:
    """Run a model on noise of the shape [channels, height, width] and find its attention layers, in
    order. Raise ValueError if there are none, or one isn't added to tokens."""
    family = type(model).__name__
    images = draw_noise((1, *image_shape), next(model.parameters())).repeat(_BATCH, 1, 1, 1)
    watch = _Discovery(image_shape[0])
    with evaluation_mode(model), ExitStack() as stack:
        try:
            run_whole(model, images[:1])  # it may keep what it computes in its first pass
            for name, module in model.named_modules():
                if name and next(module.parameters(), None) is not None:
                    on_entry = partial(watch.on_entry, name)
                    stack.enter_context(module.register_forward_pre_hook(on_entry))
            with hook_modules(model, watch.on_convolution, nn.Conv2d), watch:
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
    shape = layers[-1].shape
    links = [*(seen.link for seen in layers), watch.last_additions.get(shape, -1)]
    is_chain = links == sorted(set(links)) and links[0] >= 0
    if not is_chain or set(shape[:2]) != {_BATCH, layers[-1].num_tokens}:
        raise ValueError(
            f"an attention of {family} isn't added once and alone to tokens [batch, tokens, "
            "channels] that it reads (no residual connection, two attentions in one block, "
            "test-time augmentation?), so no map shows it"
        )
    pools = [seen for seen in watch.seen[-1:] if seen not in layers]
    return Discovered(
        num_tokens=[seen.num_tokens for seen in layers],
        attentions=[seen.number for seen in layers + pools],
        links=links,
        axes=(0, 1, 2) if shape[0] == _BATCH else (1, 0, 2),
        first=watch.first,
        patch_grids=watch.patch_grids,
    )


def run_whole(model: nn.Module, images: Images) -> Logits:
    """Run a model so that each layer computes all of its tokens; the last block of this project's
    model can leave some out."""
    if isinstance(model, VisionTransformer):
        return at_least_float32(model(images))
    return compute_logits(model, images)


@contextmanager
def hook_modules(
    model: nn.Module, hook: Callable[..., Any], kind: type[nn.Module] = nn.Module
) -> Iterator[None]:
    """Call a forward hook of every module of a kind."""
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, kind):
                stack.enter_context(module.register_forward_hook(hook))
        yield


@contextmanager
def run_as_written() -> Iterator[None]:
    """Let modules run without the code that torch.compile makes of them, and without the fast path
    of `nn.TransformerEncoderLayer`: neither can be watched."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        # nothing is compiled before the compiler is imported, which takes a second
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode, with no parameter that requires a gradient, and without
    checkpointing, which runs blocks again in the backward pass."""
    with ExitStack() as stack:
        stack.enter_context(keep_mode(model))
        stack.enter_context(run_as_written())
        # a caller may train the model afterwards
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
        for module in model.modules():
            if getattr(module, "grad_checkpointing", False):
                stack.callback(setattr, module, "grad_checkpointing", True)
                module.grad_checkpointing = False  # type: ignore[assignment]
        model.eval().requires_grad_(False)
        yield
