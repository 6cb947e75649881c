"""Read the attention of an unmodified vision transformer while its fused kernels stay on.

Fused attention never returns its weights, so hooks keep what enters it (queries and keys), and
softmax(q kᵀ · scale) is computed again when it is asked for. The forward pass is untouched: logits
with and without capture are bit-equal.

The gradient of a score f with respect to a layer's attention A follows from the heads' output O =
A·V: ∂f/∂A = (∂f/∂O) Vᵀ, per head. One backward pass to the O's gives it for all layers; no N×N
tensor enters the graph.

Each capture is verified: where A·V of its first image is not what the layer computed (an unknown
mask, a position bias, a gate …), it raises instead of returning something plausible. That waits for
the device; of many batches the first is verified (`verify`).

`run_forward` records a forward pass together with how its tokens are pooled: a map is uᵀM, where
the pool weights u say how much each output token counts in the pooled feature, and M which input
tokens it came from.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vit.explanation.capture.layers import (
    Attention,
    AttentionLayer,
    check_calls,
    find_attention_layers,
)
from vit.explanation.capture.pooling import (
    TokenWeights,
    capture_attention_pooling,
    capture_last_tokens,
    compute_pool_weights,
    has_known_pooling,
    measure_pool_weights,
)
from vit.explanation.capture.tokens import (
    Grid as Grid,
)
from vit.explanation.capture.tokens import (
    capture_patch_grids,
    count_prefix_tokens,
    replace_blocks,
)
from vit.explanation.capture.verification import check_chain, check_places
from vit.explanation.targets import CLASS, Target
from vit.model.logits import at_least_float32, compute_logits
from vit.model.model_info import keep_mode, unwrap_model
from vit.runtime.tensors import Images, Tokens

PatchMaps = Float[Tensor, "B rows columns"]


class AttentionRecord:
    """What `capture_attention` leaves of the last forward pass, first layer first."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self._layers = layers

    @property
    def layers(self) -> list[AttentionLayer]:
        """The layers. Raises RuntimeError where the last forward pass did not go through all of
        them."""
        bypassed = [layer.name for layer in self._layers if not layer.captured]
        if bypassed:
            raise RuntimeError(
                f"{len(bypassed)} of {len(self._layers)} attention layers were not captured: no "
                f"forward pass inside capture_attention went through {', '.join(bypassed)}"
            )
        return self._layers

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that the layers are part of."""
        return [layer.block for layer in self._layers]

    @property
    def attentions(self) -> list[Attention]:
        """Each layer's weights after the softmax."""
        return [layer.attention() for layer in self.layers]

    def gradients(self, score: Tensor) -> list[Attention]:
        """∂score/∂attention of each layer, by one backward pass. The graph is kept for others.

        Args:
            score: a scalar or [B]: images don't mix, so the gradient of the sum holds each image's
                own.

        Returns:
            A tensor [B, H, Nq, N] for each layer, first layer first.

        Raises:
            RuntimeError: without `capture_attention(gradients=True)`.
        """
        return [layer.attention_gradient(gradient) for layer, gradient in self.differentiate(score)]

    def differentiate(self, score: Tensor) -> list[tuple[AttentionLayer, Tensor]]:
        """Each layer with ∂score/∂O, which `AttentionLayer.attention_gradient` takes."""
        layers = self.layers
        heads = [layer.heads for layer in layers if layer.heads is not None]
        if not all(tensor.requires_grad for tensor in (score, *heads)) or not heads:
            raise RuntimeError(
                "nothing to differentiate: use capture_attention(model, gradients=True) with "
                "gradients enabled, on parameters or images that require them"
            )
        gradients = torch.autograd.grad(score.sum(), heads, retain_graph=True)
        return list(zip(layers, gradients, strict=True))


@contextmanager
def capture_attention(
    model: nn.Module,
    *,
    gradients: bool = False,
    block_tokens: bool = False,
    verify: bool = True,
) -> Iterator[AttentionRecord]:
    """Record every layer's attention in forward passes inside the `with`; the last one stays in the
    record.

    Args:
        model: of timm, torchvision, Hugging Face or this project, unmodified.
        gradients: keep the autograd graph for `record.gradients`; it takes memory.
        block_tokens: keep the tokens [B, N, D] that leave each block.
        verify: compute the first image's attention of each layer once more, and compare what it
            gives with what the layer gave.

    Returns:
        A context manager that gives the record: `.attentions` are [B, H, N, N], first layer first.

    Raises:
        ValueError: for a model whose attention is not understood (hierarchical models, unknown
            layers), and for what torch.compile made: its code would run past the hooks.

    Example:
        >>> with vit.capture_attention(model) as record: logits = model(images)
        >>> last = record.attentions[-1]
        >>> last[0, :, 0]  # what the class token attends to in each of its heads
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("torch.compile's code can't be recorded; pass, and call, the model within")
    layers = find_attention_layers(model)
    handles: list[RemovableHandle] = []
    # timm's: it would run the blocks again in the backward pass, with what they computed first in
    # no graph
    checkpointed: list[Any] = []
    if gradients:
        checkpointed = [m for m in model.modules() if getattr(m, "grad_checkpointing", False)]

    def forget(module: nn.Module, args: object) -> None:
        # a pass that bypasses a layer must not leave the one before it in its place
        for layer in layers:
            layer.captured = False

    def begin_pass(module: nn.Module, args: object) -> None:
        for layer in layers:
            layer.num_calls = 0

    def end_pass(module: nn.Module, args: object, result: object) -> None:
        check_calls(layers)

    try:
        for module in checkpointed:
            module.grad_checkpointing = False
        handles += [
            model.register_forward_pre_hook(begin_pass),
            model.register_forward_hook(end_pass),
            layers[0].module.register_forward_pre_hook(forget),
        ]
        for layer in layers:
            handles += layer.attach(
                gradients=gradients, block_tokens=gradients or block_tokens, verify=verify
            )
        yield AttentionRecord(layers)
    finally:
        for handle in handles:
            handle.remove()
        for module in checkpointed:
            module.grad_checkpointing = True


@dataclass
class Forward:
    """One recorded forward pass of a batch and how its tokens are pooled."""

    model: nn.Module
    images: Images
    logits: Float[Tensor, "B C"]
    record: AttentionRecord
    # how much each output token counts in the pooled feature; rows sum to one
    pool_weights: TokenWeights
    num_prefix_tokens: int
    grid: Grid
    # what is pooled: after the last norm, in the graph with gradients
    tokens: Tokens
    # what an attention pooling computed, see `capture_attention_pooling`
    pooling: dict[str, Tensor]
    # what is explained
    target: Target = CLASS
    # of a model without attention, what its classifier pools; in the graph with gradients
    feature_map: Tensor | None = None

    def score(self, classes: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """What gradients explain: the logit of one class of each image, or another target."""
        return self.target.score(self.logits, classes)

    def value(self, classes: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """What removing patches is measured by: the probability of one class of each image, or
        another target."""
        return self.target.value(at_least_float32(self.logits), classes)


# there is no graph in inference mode, and gradients and measured pool weights come from one
@torch.inference_mode(False)
def run_forward(
    model: nn.Module,
    images: Images,
    *,
    gradients: bool = False,
    block_tokens: bool = False,
    verify: bool = True,
) -> Forward:
    """Run `model` in evaluation mode with its attention recorded; modes and flags go back
    afterwards.

    Args:
        model: any model whose attention `capture_attention` understands.
        images: normalised images [B, 3, height, width].
        gradients: keep the autograd graph from the images on, without the parameters.
        block_tokens: keep what leaves each block.
        verify: check that maps of the capture are right (see `verification`), unless those of an
            earlier pass were.

    Returns:
        The logits, the recorded layers and the weights of the pooling.

    Raises:
        ValueError: for a model whose attention or pooling is not understood.
    """
    check_differentiable(model)
    model = unwrap_model(model)
    # a leaf of its own, so that the caller's tensor gets no gradient
    if gradients:
        images = images.detach().clone().requires_grad_()

    # a pooling that the model doesn't tell is measured in the pass itself
    is_known = has_known_pooling(model)
    pooling: dict[str, Tensor] = {}
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.set_grad_enabled(gradients))
        patch_grids = stack.enter_context(capture_patch_grids(model))
        record = stack.enter_context(
            capture_attention(model, gradients=gradients, block_tokens=block_tokens, verify=verify)
        )
        if is_known:
            pooling = stack.enter_context(capture_attention_pooling(model))
            known_model = cast("Any", model)
            tokens = known_model.forward_features(images)
            logits = known_model.forward_head(tokens)
        else:
            last_tokens = stack.enter_context(capture_last_tokens(model, record.blocks))
            logits = compute_logits(model, images)

        check_calls(record._layers)
        try:
            num_prefix, grid = _find_places(model, images, record, patch_grids)
        except RuntimeError as error:  # a layer that didn't run
            raise ValueError(str(error)) from error
        if is_known:
            pool_weights = compute_pool_weights(model, tokens, pooling)
        else:
            pool_weights, tokens = measure_pool_weights(last_tokens, logits)
            if not gradients:  # the graph of the measurement alone
                logits = logits.detach()
                tokens = tokens.detach()

    # attention may be read right, and its product still be no map of this model
    if verify:
        with evaluation_mode(model):
            check_places(model, images[:1], num_prefix=num_prefix, grid=grid)
            check_chain(model, images[:1], record.layers)
    return Forward(
        model=model,
        images=images,
        logits=logits,
        record=record,
        pool_weights=pool_weights,
        num_prefix_tokens=num_prefix,
        grid=grid,
        tokens=tokens,
        pooling=pooling,
    )


def check_differentiable(model: nn.Module) -> None:
    """Raise ValueError for a model that no gradient can go through."""
    if next(model.parameters()).is_inference():
        raise ValueError(
            f"{type(model).__name__} was made within torch.inference_mode; load it outside"
        )


def _find_places(
    model: nn.Module, images: Images, record: AttentionRecord, patch_grids: set[Grid]
) -> tuple[int, Grid]:
    """The number of prefix tokens, and the grid of the patches, which is one of `patch_grids` where
    there are any. Raises ValueError where so many patches don't tile the images."""
    # hierarchical models give each layer another number of tokens, windows another batch
    shapes = {(layer.batch, layer.num_tokens) for layer in record.layers}
    batch, num_tokens = shapes.pop()
    if shapes or batch != len(images):
        raise ValueError(
            f"{type(model).__name__} attends within windows, in branches or between fewer and "
            "fewer patches, so no attention between all of its input patches exists"
        )

    num_prefix = count_prefix_tokens(model)
    num_patches = num_tokens - num_prefix
    # prompts beside the class token (Jia et al. 2022, visual prompt tuning) are prefix tokens too,
    # which no model counts
    for grid in patch_grids:
        if math.prod(grid) <= num_patches:
            return num_tokens - math.prod(grid), grid

    height, width = images.shape[-2:]
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch_size, tuple):
        grid = (height // patch_size[0], width // patch_size[1])
        if math.prod(grid) == num_patches:
            return num_prefix, grid

    # a model that doesn't say: square patches
    rows = max(round(math.sqrt(max(num_patches, 0) * height / width)), 1)
    if num_patches < 1 or num_patches % rows:
        raise ValueError(f"{num_patches} patches do not tile an input of {height}×{width} pixels")
    return num_prefix, (rows, num_patches // rows)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no parameter that asks for a gradient, for as long as this lasts."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with keep_mode(model):
            model.eval().requires_grad_(False)
            yield
    finally:
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


def differentiate(score: Float[Tensor, " B"], tensor: Tensor) -> Tensor:
    """∂score/∂tensor, at least float32. Images don't mix, so the gradient of the sum holds each
    image's own. The graph is kept for others."""
    (gradient,) = torch.autograd.grad(score.sum(), tensor, retain_graph=True)
    return at_least_float32(gradient)


def classify_token(forward: Forward, token: Float[Tensor, "K D"]) -> Float[Tensor, "K C"]:
    """The logits if every token that leaves the encoder were `token`: the classifier without its
    pooling.

    Args:
        forward: a forward pass of the model.
        token: K tokens, which give K rows of logits.

    Returns:
        Logits [K, C].

    Raises:
        ValueError: for a model that can't classify a single patch.
    """
    # whatever the pooling, it gives this one token
    alike = token[:, None].expand(-1, forward.num_prefix_tokens + 1, -1)
    if has_known_pooling(forward.model):
        known_model = cast("Any", forward.model)
        logits: Tensor = known_model.forward_head(known_model.norm(alike))
        return logits

    # where the model doesn't show its classifier, one image runs with `token` in the place of what
    # the blocks give
    with (
        evaluation_mode(forward.model),
        replace_blocks(forward.record.blocks, lambda *args, **options: alike),
    ):
        try:
            return compute_logits(forward.model, forward.images[:1].detach())
        except (RuntimeError, IndexError) as error:  # a shape
            name = type(forward.model).__name__
            raise ValueError(
                f"{name} can't classify a single patch, which LeGrad asks for: {error}"
            ) from error


def split_prefix(
    mass: Float[Tensor, "*batch N"], *, num_prefix_tokens: int, grid: Grid
) -> tuple[Float[Tensor, "*batch rows columns"], Float[Tensor, "*batch"]]:
    """The patches' mass on their grid, and the fraction (0 to 1, of absolute values) that lies in
    prefix tokens."""
    patches = torch.unflatten(mass[..., num_prefix_tokens:], -1, grid)
    total = mass.abs().sum(dim=-1)
    prefix = mass[..., :num_prefix_tokens].abs().sum(dim=-1)
    tiny = torch.finfo(mass.dtype).tiny
    return patches, torch.where(total > 0, prefix / total.clamp_min(tiny), 0.0)


def compute_entropy(maps: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    """Entropy in nats of the maps' absolute values taken as a distribution: 0 (one patch) to
    log(patches)."""
    mass = maps.flatten(-2).abs()
    distribution = mass / mass.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
    entropy: Tensor = torch.special.entr(distribution).sum(dim=-1)
    return entropy
