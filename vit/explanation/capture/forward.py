"""Read the attention of an unmodified vision transformer while its fused kernels stay on.

Fused attention never returns its weights, so hooks keep what enters it (queries and keys), and
softmax(q kᵀ · scale) is computed again on demand. The forward pass doesn't change: logits with and
without capture are bit-equal.

The gradient of a score f with respect to a layer's attention A follows from the heads' output O =
A·V: ∂f/∂A = (∂f/∂O) Vᵀ, per head. One backward pass to the O's gives it for all layers; no N×N
tensor enters the graph.

Each capture is verified: if A·V of its first image differs from the layer's result (an unknown
mask, a position bias, a gate …), it raises an error instead of returning something plausible. The
check waits for the device, so only the first of many batches is verified (`verify`).

`run_forward` records a forward pass together with the weights u that its output tokens have in the
pooled feature. A map is uᵀM, where M contains the share of each input token in each output token.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.capture.discovery import run_whole
from vit.explanation.capture.feature_maps import (
    find_feature_map,
    order_channels,
    record_outputs,
)
from vit.explanation.capture.layers import (
    Attention,
    AttentionLayer,
    check_calls,
    run_as_written,
    without_fast_path,
)
from vit.explanation.capture.pooling import (
    TokenWeights,
    capture_last_tokens,
    measure_pool_weights,
)
from vit.explanation.capture.reader import ModelReader, read_bundle, read_model
from vit.explanation.capture.tokens import Grid, capture_patch_grids, find_places
from vit.explanation.capture.verification import (
    check_bypass,
    check_gradient,
    check_mixing,
    check_places,
    check_repeatable,
)
from vit.explanation.targets import CLASS, Target
from vit.model.logits import at_least_float32, compute_logits
from vit.model.model_info import keep_mode
from vit.runtime.tensors import Images, Tokens

PatchMaps = Float[Tensor, "B rows columns"]


class AttentionRecord:
    """The attention of the last forward pass within `capture_attention`, first layer first."""

    def __init__(self, *, gradients: bool) -> None:
        self._layers: list[AttentionLayer] = []
        self._gradients = gradients
        # a few queries that attend to the tokens after the last layer
        self.pool: AttentionLayer | None = None

    @property
    def layers(self) -> list[AttentionLayer]:
        """The layers. Raises RuntimeError if the last forward pass didn't go through all of
        them."""
        bypassed = [layer.name for layer in self._layers if not layer.captured]
        if bypassed:
            raise RuntimeError(
                f"{len(bypassed)} of {len(self._layers)} attention layers were not captured: no "
                f"forward pass inside capture_attention went through {', '.join(bypassed)}"
            )
        return self._layers

    @property
    def attentions(self) -> list[Attention]:
        """Each layer's weights after the softmax, in the autograd graph if gradients are kept."""
        everything = slice(None)
        if self._gradients and torch.is_grad_enabled():
            self._list_heads()
        return [layer.call.compute_weights(everything)(everything) for layer in self.layers]

    def gradients(self, score: Tensor) -> list[Attention]:
        """Compute ∂score/∂attention of each layer by one backward pass. The graph is kept.

        Args:
            score: A scalar or [B]. Images don't mix, so the gradient of the sum contains the
                gradient of each image.

        Returns:
            A tensor [B, H, Nq, N] for each layer, first layer first.

        Raises:
            RuntimeError: The pass was recorded without `capture_attention(gradients=True)`.
        """
        return [layer.attention_gradient(gradient) for layer, gradient in self.differentiate(score)]

    def differentiate(self, score: Tensor) -> list[tuple[AttentionLayer, Tensor]]:
        """Compute ∂score/∂O of each layer, which `AttentionLayer.attention_gradient` takes."""
        heads = self._list_heads()
        # several classes and methods are differentiated one after another
        gradients = torch.autograd.grad(score.sum(), heads, retain_graph=True)
        found = {id(tensor): gradient for tensor, gradient in zip(heads, gradients, strict=True)}
        return [
            # frozen layers have no gradient
            (layer, found.get(id(layer.heads), torch.zeros_like(layer.call.output)))
            for layer in self.layers
        ]

    def _list_heads(self) -> list[Tensor]:
        """List the layers' results in the graph. Raise RuntimeError if there are none."""
        heads = [layer.heads for layer in self.layers if layer.heads is not None]
        heads = [tensor for tensor in heads if tensor.requires_grad]
        if not heads:
            raise RuntimeError(
                "nothing to differentiate: use capture_attention(model, gradients=True) with "
                "gradients enabled, on parameters or images that require them, and checkpointing "
                "with use_reentrant=False"
            )
        return heads


@contextmanager
def capture_attention(
    model: nn.Module | ModelReader, *, gradients: bool = False, verify: bool = True
) -> Iterator[AttentionRecord]:
    """Record every layer's attention in forward passes inside the `with`.

    The record has the attention of the last pass.

    Args:
        model: An unmodified model of timm, torchvision, Hugging Face or this
            project.
        gradients: Keep the autograd graph, for `record.gradients` and for
            functions of `record.attentions`; it takes memory.
        verify: Compute each layer's attention of the first image once more, and
            compare the result with the layer's own.

    Returns:
        A context manager that returns the record: `.attentions` are
        [B, H, N, N], first layer first.

    Raises:
        ValueError: The attention can't be read (hierarchical models, unknown
            layers), or torch.compile made the model, whose code skips hooks.

    Example:
        >>> with vit.capture_attention(model) as record: logits = model(images)
        >>> last = record.attentions[-1]
        >>> last[0, :, 0]  # attention of the class token in each of its heads

        A penalty on attention, in a training loop:

        >>> with vit.capture_attention(model, gradients=True) as record:
        ...     loss = criterion(model(images), labels)
        >>> loss += 0.1 * sum(a.square().mean() for a in record.attentions)
        >>> loss.backward()
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("torch.compile's code can't be recorded; pass, and call, the model within")
    reader = read_model(model)
    called: nn.Module = reader.model if isinstance(model, ModelReader) else model
    record = AttentionRecord(gradients=gradients)
    layers = record._layers

    with ExitStack() as stack:

        def keep_tokens(link: int, tokens: Tensor) -> Tensor:
            if link == 0:
                # a layer that this pass bypasses must not keep the attention of the pass before
                for layer in recorded:
                    layer.begin(tokens)
            if gradients and link < len(layers):
                layers[link].block_input = tokens
            return tokens

        def attach() -> None:
            stack.enter_context(reader.change_links(keep_tokens))
            layers.extend(reader.build_layers())
            recorded.extend(layers)
            if reader.attention.pool is not None:
                record.pool = AttentionLayer(reader.model, reader.attention.pool)
                recorded.append(record.pool)
            for layer in recorded:
                stack.enter_context(layer.record(gradients=gradients, verify=verify))

        def begin_pass(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            # the images tell their size; to find the layers, the model runs once more
            if not layers and reader.image_size is None:
                tensors = (arg for arg in (*args, *options.values()) if isinstance(arg, Tensor))
                images = next((tensor for tensor in tensors if tensor.ndim == 4), None)
                if images is None:
                    raise ValueError(
                        f"{type(module).__name__} isn't called with a tensor of images [batch, "
                        "channels, height, width], so their size is unknown; pass one"
                    )
                read_model(reader, images)
                attach()
            for layer in layers:
                layer.num_calls = 0

        def end_pass(module: nn.Module, args: object, result: object) -> None:
            check_calls(layers)

        recorded: list[AttentionLayer] = []
        # timm's gradient checkpointing runs the blocks again in the backward pass, so that the
        # captured tensors would be in no graph
        for module in called.modules():
            if gradients and getattr(module, "grad_checkpointing", False):
                module.grad_checkpointing = False  # type: ignore[assignment]
                stack.callback(setattr, module, "grad_checkpointing", True)
        stack.enter_context(without_fast_path())
        stack.enter_context(run_as_written())
        stack.enter_context(called.register_forward_pre_hook(begin_pass, with_kwargs=True))
        stack.enter_context(called.register_forward_hook(end_pass))
        if reader.has_known_size:
            attach()
        yield record


@dataclass
class Forward:
    """One recorded forward pass of a batch, and how its tokens are pooled.

    A model without readable attention has no recorded layers. Its patches are the places of the
    feature map that its classifier reads, or else parts of the image.

    Attributes:
        reader: The model, in evaluation mode.
        images: Normalised images; with gradients, a leaf of the graph.
        logits: Outputs of the model.
        record: The recorded attention layers.
        pool_weights: Weight of each output token in the pooled feature; rows sum to one.
        num_prefix_tokens: Number of tokens in front of the patches.
        grid: Rows and columns of patches.
        tokens: Tokens that are pooled, after the last norm; with gradients, in the graph.
        target: The number that is explained.
        feature_map: The feature map of a model without readable attention, if there is one; with
            gradients, in the graph.
    """

    reader: ModelReader
    images: Images
    logits: Float[Tensor, "B C"]
    record: AttentionRecord
    pool_weights: TokenWeights
    num_prefix_tokens: int
    grid: Grid
    tokens: Tokens
    target: Target = CLASS
    feature_map: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.reader.model

    def score(self, classes: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Compute the number that gradients explain: the logit of one class of each image, or
        another target."""
        return self.target.score(self.logits, classes)

    def value(self, classes: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Compute the number that shows the effect of removed patches: the probability of one class
        of each image, or another target."""
        return self.target.value(at_least_float32(self.logits), classes)


# there is no graph in inference mode, and gradients and measured pool weights need one
@torch.inference_mode(False)
def run_forward(
    model: nn.Module | ModelReader,
    images: Images,
    *,
    gradients: bool = False,
    verify: bool = True,
) -> Forward:
    """Run a classifier in evaluation mode and record what maps need. Modes and flags are restored.

    Args:
        model: A model, whose `ModelReader.source` is recorded: its attention, its feature map
            (ResNet, ConvNeXt, Swin), or nothing but the graph from its pixels on.
        images: Normalised images [B, channels, height, width].
        gradients: Keep the autograd graph from the images on, without the parameters.
        verify: Check that maps of the recorded tensors are right, see `verification` and
            `feature_maps`, and that a second pass gives the same. One pass of a model is enough.

    Raises:
        ValueError: The model's attention, pooling or feature map can't be read, or a check fails.
    """
    reader = read_model(model, images)
    check_differentiable(reader.model)
    if not reader.has_attention:
        return _run_without_attention(reader, images, gradients=gradients, verify=verify)
    model = reader.model
    # a new leaf, so that the caller's tensor gets no gradient
    if gradients:
        images = images.detach().clone().requires_grad_()

    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        stack.enter_context(torch.set_grad_enabled(gradients))
        patch_grids = stack.enter_context(capture_patch_grids(model, images.shape[1]))
        record = stack.enter_context(capture_attention(reader, gradients=gradients, verify=verify))
        last_tokens = stack.enter_context(capture_last_tokens(reader))
        logits = run_whole(model, images)

        _check_graph(model, logits, gradients=gradients)
        check_calls(record._layers)
        try:
            layers = record.layers
        except RuntimeError as error:  # a layer that didn't run
            raise ValueError(str(error)) from error
        shapes = {(layer.batch, layer.num_tokens) for layer in layers}
        num_prefix, grid = find_places(model, images, shapes, patch_grids)
        pool_weights, tokens = measure_pool_weights(reader, last_tokens, logits)
        if not gradients:  # the graph was for the measurement alone
            logits = logits.detach()
            tokens = tokens.detach()

    # attention may be read right, and its product still be no map of this model
    if verify:
        with evaluation_mode(model), without_fast_path():
            check_places(reader, images[:1], num_prefix=num_prefix, grid=grid)
            check_repeatable(model, images[:1], logits[:1])
            check_bypass(reader, images[:1], layers[0].num_tokens)
            check_mixing(reader, images[:1], layers[0].num_tokens)
    return Forward(
        reader=reader,
        images=images,
        logits=logits,
        record=record,
        pool_weights=pool_weights,
        num_prefix_tokens=num_prefix,
        grid=grid,
        tokens=tokens,
    )


def _check_graph(model: nn.Module, logits: Tensor, *, gradients: bool) -> None:
    """Raise ValueError if gradients are needed and the logits have none."""
    if gradients and not logits.requires_grad:
        raise ValueError(
            f"{type(model).__name__} ends in a softmax or another function that "
            "LibraGrad takes as a constant; explain the model without it, or take a method "
            "without libra, such as gae"
        )


def _run_without_attention(
    reader: ModelReader, images: Images, *, gradients: bool, verify: bool
) -> Forward:
    """Run a classifier, and record its feature map if maps are read from one."""
    model = reader.model
    # a new leaf, so that the caller's tensor gets no gradient
    images = images.detach().clone()
    number = None
    with evaluation_mode(model):
        if reader.source == "feature map":
            if verify or reader.found.feature_map is None:
                reader.found.feature_map = find_feature_map(model, images[:1])
            number = reader.found.feature_map
        images.requires_grad_(gradients)
        with torch.set_grad_enabled(gradients), record_outputs(model, number) as outputs:
            logits = compute_logits(model, images)
        _check_graph(model, logits, gradients=gradients)
        if verify:
            check_repeatable(model, images[:1], logits[:1])
        if verify and number is None:
            check_gradient(model, images[:1])

    feature_map = None
    places = images.new_empty(len(images), 0, *map(_choose_places, images.shape[-2:]))
    if number is not None:
        (feature_map,) = outputs
        ordered = order_channels(model, feature_map, images)
        assert ordered is not None
        places = ordered
    # the places take the role of patches
    tokens = places.flatten(2).mT
    rows, columns = places.shape[2:]
    return Forward(
        reader=reader,
        images=images,
        logits=logits,
        record=AttentionRecord(gradients=gradients),
        # the mean over all places, as in global average pooling
        pool_weights=torch.full_like(logits.detach()[:, :1], 1 / (rows * columns)).expand(
            -1, rows * columns
        ),
        num_prefix_tokens=0,
        grid=(rows, columns),
        tokens=tokens,
        feature_map=feature_map,
    )


def _choose_places(side: int) -> int:
    """Choose the number of parts of a side of the image for maps of the pixels alone: 8 to 16 that
    divide it, or 14."""
    return next((number for number in range(16, 7, -1) if side % number == 0), min(14, side))


def settle_source(reader: ModelReader, images: Images) -> bool:
    """Find the source of maps of a model: its attention, its feature map, or its pixels.
    The reader keeps the answer, and why the better ones are refused.

    Args:
        reader: The model.
        images: Normalised images, of which the first is tried.

    Returns:
        True if the first image was verified now; False if the source was settled before.

    Raises:
        ValueError: Not even maps of the pixels are right, because two passes differ.
    """
    read_model(reader, images)  # they may have another size than the model tells
    is_settled_now = False
    if not reader.is_settled:
        reader.forget()
    # this project's own model is always read
    while not (reader.is_settled or reader.is_ours):
        source = reader.source
        try:
            run_forward(reader, images[:1])
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, AttributeError, TypeError, LookupError) as error:
            if source == "pixels":  # it isn't the reading that fails
                reader.refused.clear()
                raise
            reader.refused[source] = str(error)
            if not isinstance(error, ValueError):
                reader.refused[source] = f"reading it fails with {error!r}"
        else:
            is_settled_now = True
            reader.settle(images)
    return is_settled_now


def open_reader(bundle: Bundle) -> ModelReader:
    """Return the reader of a bundle's model, with its source settled by an image of noise."""
    reader = read_bundle(bundle)
    if not (reader.is_settled or reader.is_ours):
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(1, reader.channels, *bundle.preprocess.image_size, generator=generator)
        settle_source(reader, noise.to(next(reader.model.parameters())))
    return reader


def check_differentiable(model: nn.Module) -> None:
    """Raise ValueError if no gradient can go through the model."""
    name = type(model).__name__
    for parameter in itertools.islice(model.parameters(), 1):
        # torch would fail later, with a message about saved tensors
        if parameter.is_inference():
            raise ValueError(f"{name} was made within torch.inference_mode; load it outside of it")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device, without weights; load its weights")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode, with no parameter that requires a gradient."""
    # a caller may train the model afterwards
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with keep_mode(model), run_as_written():
            model.eval().requires_grad_(False)
            yield
    finally:
        for parameter, requires_grad in flags:
            parameter.requires_grad_(requires_grad)


def differentiate(score: Float[Tensor, " B"], tensor: Tensor) -> Tensor:
    """Compute ∂score/∂tensor in float32 or more. Images don't mix, so the gradient of the sum
    contains the gradient of each image. The graph is kept."""
    (gradient,) = torch.autograd.grad(score.sum(), tensor, retain_graph=True)
    return at_least_float32(gradient)


def split_prefix(
    mass: Float[Tensor, "*batch N"], *, num_prefix_tokens: int, grid: Grid
) -> Float[Tensor, "*batch rows columns"]:
    """Return the patches' mass on their grid."""
    return torch.unflatten(mass[..., num_prefix_tokens:], -1, grid)
