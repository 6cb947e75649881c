"""Read the attention of an unmodified vision transformer while its fused kernels stay on.

Fused attention never returns its weights, so its queries and keys are kept, and softmax(q kᵀ ·
scale) is computed again on demand. Logits with and without capture are bit-equal.

The gradient of a score f with respect to a layer's attention A follows from the heads' output O =
A·V: ∂f/∂A = (∂f/∂O) Vᵀ, per head. One backward pass to the O's gives it for all layers; no N×N
tensor enters the graph.

`run_forward` records a forward pass together with the weights u that its output tokens have in the
pooled feature. A map is uᵀM, where M contains the share of each input token in each output token.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.capture.discovery import run_as_written, run_whole
from vit.explanation.capture.feature_maps import (
    find_feature_map,
    order_channels,
    record_outputs,
)
from vit.explanation.capture.layers import Attention, AttentionLayer
from vit.explanation.capture.pooling import (
    TokenWeights,
    capture_last_tokens,
    measure_pool_weights,
)
from vit.explanation.capture.reader import ModelReader, read_bundle, read_model
from vit.explanation.capture.tokens import Grid, capture_patch_grids, draw_noise, find_places
from vit.explanation.capture.verification import (
    check_bypass,
    check_mixing,
    check_places,
    check_repeatable,
)
from vit.explanation.targets import CLASS, Target
from vit.model.logits import at_least_float32, compute_logits
from vit.model.model_info import keep_mode
from vit.runtime.tensors import Images, Logits, Tokens

PatchMaps = Float[Tensor, "B rows columns"]


class AttentionRecord:
    """The attention of the last forward pass within `capture_attention`, first layer first."""

    def __init__(self, *, gradients: bool, verify: bool = False) -> None:
        self._gradients = gradients
        self._verify = verify
        self._names: list[str] = []
        self._found: dict[int, AttentionLayer] = {}
        self._inputs: dict[int, Tensor] = {}  # tokens that enter each block
        self._verified: set[int] = set()

    def watch(self, reader: ModelReader) -> AbstractContextManager[None]:
        """Record forward passes of a model."""
        self._names = reader.places

        def keep_tokens(link: int, tokens: Tensor) -> Tensor | None:
            if link == 0:
                # a layer that this pass bypasses must not keep the attention of the pass before
                self._found.clear()
            if not self._gradients:
                return None
            self._inputs[link] = tokens
            return tokens

        def keep_layer(place: int, layer: AttentionLayer) -> None:
            if self._verify and place not in self._verified and not reader.model.training:
                layer.verify([*reader.places, reader.attention.pool or ""][place])
                self._verified.add(place)
            self._found[place] = layer if self._gradients else layer.detach()
            self._found[place].block_input = self._inputs.get(place)

        return reader.watch(keep_tokens, keep_layer)

    @property
    def layers(self) -> list[AttentionLayer]:
        """The layers. Raises RuntimeError if the last forward pass didn't go through all of
        them."""
        found = [self._found[place] for place in range(len(self._names)) if place in self._found]
        if not found or len(found) < len(self._names):
            raise RuntimeError(
                f"{len(self._names) - len(found)} of {len(self._names)} attention layers were not "
                "captured: no forward pass inside capture_attention went through them"
            )
        return found

    @property
    def pool(self) -> AttentionLayer | None:
        """A few queries that attend to the tokens after the last layer, if there are any."""
        return self._found.get(len(self._names))

    @property
    def attentions(self) -> list[Attention]:
        """Each layer's weights after the softmax, in the autograd graph if gradients are kept."""
        if self._gradients and torch.is_grad_enabled():
            self._list_heads()
        return [layer.compute_weights()(slice(None)) for layer in self.layers]

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
        found = dict(zip(map(id, heads), gradients, strict=True))
        # frozen layers have no gradient
        return [
            (layer, found.get(id(layer.heads), torch.zeros_like(layer.output)))
            for layer in self.layers
        ]

    def _list_heads(self) -> list[Tensor]:
        """List the layers' results in the graph. Raise RuntimeError if there are none."""
        heads = [layer.heads for layer in self.layers if layer.heads is not None]
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
    record = AttentionRecord(gradients=gradients, verify=verify)
    with ExitStack() as stack:

        def watch_late(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            # the images tell their size; to find the layers, the model runs once more
            for images in (*args, *options.values()):
                is_first = isinstance(images, Tensor) and images.ndim == 4
                if is_first and not reader.has_known_size:
                    read_model(reader, images)
                    stack.enter_context(record.watch(reader))

        # timm's gradient checkpointing runs the blocks again in the backward pass, so that the
        # captured tensors would be in no graph
        for module in called.modules():
            if gradients and getattr(module, "grad_checkpointing", False):
                module.grad_checkpointing = False  # type: ignore[assignment]
                stack.callback(setattr, module, "grad_checkpointing", True)
        stack.enter_context(run_as_written())
        if reader.has_known_size:
            stack.enter_context(record.watch(reader))
        else:
            stack.enter_context(called.register_forward_pre_hook(watch_late, with_kwargs=True))
        yield record


@dataclass
class Forward:
    """One recorded forward pass of a batch, and how its tokens are pooled.

    A model without readable attention has no recorded layers. Its patches are the places of the
    feature map that its classifier reads, or else parts of the image.

    Attributes:
        reader: The model.
        images: Normalised images; with gradients, a leaf of the graph of the tensors below.
        logits: Outputs of the model.
        record: The recorded attention layers.
        pool_weights: Weight of each output token in the pooled feature; rows sum to one.
        num_prefix_tokens: Number of tokens in front of the patches.
        grid: Rows and columns of patches.
        tokens: Tokens that are pooled, after the last norm.
        target: The number that is explained.
        feature_map: The feature map of a model without readable attention, if there is one.
    """

    reader: ModelReader
    images: Images
    logits: Logits
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
        model: A model, whose `ModelReader.source` is recorded.
        images: Normalised images.
        gradients: Keep the autograd graph from the images on, without the parameters.
        verify: Check that maps of the recorded tensors are right. One pass of a model is enough.

    Raises:
        ValueError: The model's attention, pooling or feature map can't be read, or a check fails.
    """
    reader = read_model(model, images)
    # a new leaf, so that the caller's tensor gets no gradient
    images = images.detach().clone()
    run = _run_with_attention if reader.has_attention else _run_without_attention
    with evaluation_mode(reader.model):
        forward = run(reader, images, gradients=gradients, verify=verify)
        if verify:
            check_repeatable(reader.model, images[:1], forward.logits[:1].detach())
    return forward


def _check_graph(model: nn.Module, logits: Logits, *, gradients: bool) -> None:
    """Raise ValueError if gradients are needed and the logits have none."""
    if gradients and not logits.requires_grad:
        raise ValueError(
            f"{type(model).__name__} ends in a softmax or another function that LibraGrad takes as "
            "a constant; explain the model without it, or take a method without libra, such as gae"
        )


def _run_with_attention(
    reader: ModelReader, images: Images, *, gradients: bool, verify: bool
) -> Forward:
    """Run a classifier, and record its attention."""
    images.requires_grad_(gradients)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(gradients))
        patch_grids = stack.enter_context(capture_patch_grids(reader.model, images.shape[1]))
        record = stack.enter_context(capture_attention(reader, gradients=gradients, verify=verify))
        last_tokens = stack.enter_context(capture_last_tokens(reader))
        logits = run_whole(reader.model, images)
        _check_graph(reader.model, logits, gradients=gradients)
        try:
            layers = record.layers
        except RuntimeError as error:  # a layer that ran in another way than when it was found
            raise ValueError(str(error)) from error
        shapes = {(layer.shape[0], layer.num_tokens) for layer in layers}
        num_prefix, grid = find_places(reader.model, images, shapes, patch_grids)
        pool_weights, tokens = measure_pool_weights(reader, last_tokens, logits)
        if not gradients:  # the graph was for the measurement alone
            logits = logits.detach()
            tokens = tokens.detach()

    # attention may be read right, and its product still be no map of this model
    if verify:
        num_tokens = layers[0].num_tokens
        check_places(reader, images[:1], num_prefix=num_prefix, grid=grid)
        check_bypass(reader, images[:1], num_tokens)
        check_mixing(reader, images[:1], num_tokens)
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


def _run_without_attention(
    reader: ModelReader, images: Images, *, gradients: bool, verify: bool
) -> Forward:
    """Run a classifier, and record its feature map if maps are read from one."""
    model = reader.model
    number = None
    if reader.source == "feature map":
        if verify or reader.found.feature_map is None:
            reader.found.feature_map = find_feature_map(model, images[:1])
        number = reader.found.feature_map
    images.requires_grad_(gradients or verify)
    with torch.set_grad_enabled(gradients or verify), record_outputs(model, number) as outputs:
        logits = compute_logits(model, images)
    _check_graph(model, logits, gradients=gradients)
    gradient = None
    if verify and logits.requires_grad:
        # the weights may have gradients where the pixels have none
        (gradient,) = torch.autograd.grad(
            logits.sum(), images, retain_graph=True, allow_unused=True
        )
    if verify and gradient is None:
        raise ValueError(
            f"no gradient leads from the logits of {type(model).__name__} to the pixels, and its maps"
            " need one; explain a quantised model before it is quantised"
        )

    feature_map = None
    places: Tensor | None = images.new_empty(len(images), 0, *map(_split_side, images.shape[-2:]))
    if number is not None:
        (feature_map,) = outputs
        places = order_channels(model, feature_map, images)
    assert places is not None
    rows, columns = places.shape[2:]
    # the mean over all places, as in global average pooling
    pool_weights = torch.full_like(logits.detach()[:, :1], 1 / (rows * columns))
    return Forward(
        reader=reader,
        images=images,
        logits=logits,
        record=AttentionRecord(gradients=gradients),
        pool_weights=pool_weights.expand(-1, rows * columns),
        num_prefix_tokens=0,
        grid=(rows, columns),
        # the places take the role of patches
        tokens=places.flatten(2).mT,
        feature_map=feature_map,
    )


def _split_side(side: int) -> int:
    """Choose the number of parts of a side of the image for maps of the pixels alone: 8 to 16 that
    divide it, or 14."""
    return next((number for number in range(16, 7, -1) if side % number == 0), min(14, side))


def settle_source(reader: ModelReader, images: Images) -> None:
    """Find the source of maps of a model by its first image. The reader keeps the answer, and why
    better sources are refused. Raise ValueError if not even maps of the pixels are right."""
    is_settled = reader.recall(images)
    while not is_settled:
        source = reader.source
        try:
            run_forward(reader, images[:1])
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, AttributeError, TypeError, LookupError) as error:
            if source == "pixels":  # it isn't the reading that fails
                raise
            reason = str(error) if isinstance(error, ValueError) else f"it fails with {error!r}"
            reader.found.refused[source] = reason
        else:
            is_settled = True
            reader.keep(images)


def open_reader(bundle: Bundle) -> ModelReader:
    """Return the reader of a bundle's model, with its source settled by an image of noise."""
    reader = read_bundle(bundle)
    shape = (1, reader.channels, *bundle.preprocess.image_size)
    settle_source(reader, draw_noise(shape, next(reader.model.parameters())))
    return reader


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
