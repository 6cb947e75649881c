"""Read the attention of an unmodified vision transformer while its fused kernels stay on.

Fused attention never returns its weights, so its queries and keys are kept, and softmax(q kᵀ ·
scale) is computed again on demand. Logits with and without capture are bit-equal.

The gradient of a score f by the attention A of a head with the output O = A·V is ∂f/∂A = (∂f/∂O)
Vᵀ. One backward pass to the O's gives it for all layers; no N×N tensor enters the graph.

`run_forward` records a forward pass together with the weights u that its output tokens have in the
pooled feature. A map is uᵀM, where M contains the share of each input token in each output token.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.capture.discovery import (
    Grid,
    LayerWatch,
    draw_noise,
    evaluation_mode,
    run_as_written,
    run_whole,
)
from vit.explanation.capture.feature_maps import (
    check_feature_map,
    order_channels,
    record_outputs,
)
from vit.explanation.capture.pooling import (
    TokenWeights,
    capture_last_tokens,
    measure_pool_weights,
)
from vit.explanation.capture.reader import ModelReader, read_model
from vit.explanation.capture.verification import check_attention
from vit.explanation.capture.watch import Attention, AttentionLayer, find_tolerance
from vit.explanation.targets import CLASS, Classes, Numbers, Target
from vit.model.logits import at_least_float32, compute_logits
from vit.runtime.tensors import Images, Logits, Tokens


class AttentionRecord:
    """The attention of the last forward pass within `capture_attention`, first layer first."""

    def __init__(self, *, gradients: bool, verify: bool = True) -> None:
        self._gradients = gradients
        self._verify = verify
        self._num_layers = 0
        self._found: dict[int, AttentionLayer] = {}

    def watch(self, reader: ModelReader) -> AbstractContextManager[LayerWatch]:
        """Record forward passes of a model."""
        self._num_layers = reader.attention.num_layers
        inputs: dict[int, Tensor] = {}

        def keep_tokens(link: int, tokens: Tensor) -> Tensor | None:
            if link == 0:
                # a layer that this pass bypasses must not keep the attention of the pass before
                self._found.clear()
            if not self._gradients:
                return None
            inputs[link] = tokens
            return tokens

        def keep_layer(number: int, layer: AttentionLayer) -> None:
            if self._verify and not reader.model.training:
                layer.verify(f"attention layer {number + 1} of {type(reader.model).__name__}")
            self._found[number] = layer if self._gradients else layer.detach()
            self._found[number].block_input = inputs.get(number)

        return reader.watch(keep_tokens, keep_layer)

    @property
    def layers(self) -> list[AttentionLayer]:
        """The layers. Raises RuntimeError if the last forward pass didn't go through all."""
        count = self._num_layers
        if not count:
            raise RuntimeError("no images [B, C, H, W] went through the model in capture_attention")
        missing = set(range(count)) - self._found.keys()
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {count} attention layers were not captured: "
                "no forward pass inside capture_attention went through them"
            )
        return [self._found[number] for number in range(count)]

    @property
    def pool(self) -> AttentionLayer | None:
        """A few queries that attend to the tokens after the last layer, if there are any."""
        return self._found.get(self._num_layers)

    @property
    def attentions(self) -> list[Attention]:
        """Each layer's weights after the softmax, in the autograd graph if gradients are kept."""
        if self._gradients and torch.is_grad_enabled():
            self._list_outputs()
        return [layer.attention() for layer in self.layers]

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
        pairs = [layer.gradient_and_value(output) for layer, output in self.differentiate(score)]
        return [gradient @ value.mT for gradient, value in pairs]

    def differentiate(self, score: Tensor) -> list[tuple[AttentionLayer, Tensor]]:
        """Compute ∂score/∂O of each layer, which `AttentionLayer.gradient_and_value` takes."""
        # several classes and methods are differentiated one after another
        found = iter(torch.autograd.grad(score.sum(), self._list_outputs(), retain_graph=True))
        # frozen layers have no gradient
        return [
            (layer, next(found) if layer.output.requires_grad else torch.zeros_like(layer.output))
            for layer in self.layers
        ]

    def _list_outputs(self) -> list[Tensor]:
        """List the layers' results in the graph. Raise RuntimeError if there are none."""
        outputs = [layer.output for layer in self.layers if layer.output.requires_grad]
        if not outputs:
            raise RuntimeError(
                "nothing to differentiate: use capture_attention(model, gradients=True) with "
                "gradients enabled, on parameters or images that require them, and checkpointing "
                "with use_reentrant=False"
            )
        return outputs


@contextmanager
def capture_attention(model: nn.Module, *, gradients: bool = False) -> Iterator[AttentionRecord]:
    """Record every layer's attention in forward passes inside the `with`.

    The record has the attention of the last pass. In evaluation mode, a part of
    each layer's attention is computed once more and compared with its own.

    Args:
        model: An unmodified model of timm, torchvision, Hugging Face or this
            project.
        gradients: Keep the autograd graph, for `record.gradients` and for
            functions of `record.attentions`; it takes memory.

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
    record = AttentionRecord(gradients=gradients)
    with ExitStack() as stack, ExitStack() as hooks:

        def begin(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            # the images tell their size; to find the layers, the model runs once more
            for images in (*args, *options.values()):
                if isinstance(images, Tensor) and images.ndim == 4:
                    hooks.close()
                    stack.enter_context(record.watch(read_model(model, images))).begin()
                    return

        stack.enter_context(run_as_written())
        # parts of a model may be called without it
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
        yield record


@dataclass
class Forward:
    """One recorded forward pass of a batch, and how its tokens are pooled.

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
        feature_map: The feature map of a model without readable attention.
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

    def score(self, classes: Classes) -> Numbers:
        """Compute the number that gradients explain, see `Target`, for one class of each image."""
        return self.target.score(self.logits, classes)

    def value(self, classes: Classes) -> Numbers:
        """Compute the number that shows the effect of removed patches."""
        return self.target.value(at_least_float32(self.logits), classes)


# there is no graph in inference mode, and gradients and measured pool weights need one
@torch.inference_mode(False)
def run_forward(
    model: nn.Module | ModelReader, images: Images, *, gradients: bool = False
) -> Forward:
    """Run a classifier in evaluation mode and record what maps need; `gradients` keeps the graph
    from the images on. Raise ValueError if something can't be read, or a check fails."""
    reader = read_model(model, images)
    # a new leaf, so that the caller's tensor gets no gradient
    images = images.detach().clone().requires_grad_(gradients)
    run = _run_with_attention if reader.has_attention else _run_without_attention
    with evaluation_mode(reader.model), torch.set_grad_enabled(gradients):
        forward = run(reader, images)
        if not reader.is_checked:
            _check_forward(forward, images[:1].detach())
    return forward


def _check_forward(forward: Forward, image: Images) -> None:
    """Raise ValueError if maps of a forward pass, whose first image this is, would be wrong."""
    model = forward.reader.model
    if forward.reader.has_attention:
        check_attention(forward.reader, image)
    logits = forward.logits[:1].detach()
    with torch.no_grad():
        change = (compute_logits(model, image) - logits).abs().max()
    # one image and a batch are rounded differently
    if change > 10 * find_tolerance(image) * logits.abs().max():
        raise ValueError(
            f"two passes of {type(model).__name__} over one image give different "
            "logits (dropout or a random mask in evaluation mode?), so no map explains it"
        )


def _check_graph(model: nn.Module, logits: Logits) -> None:
    """Raise ValueError if logits have no gradient."""
    if not logits.requires_grad:
        raise ValueError(
            f"the logits of {type(model).__name__} have no gradient: explain a quantised model "
            "before it is quantised, and one that ends in a softmax, which LibraGrad takes as a "
            "constant, without it or by a method without libra, such as gae"
        )


def _run_with_attention(reader: ModelReader, images: Images) -> Forward:
    """Run a classifier, and record its attention."""
    num_prefix, grid = reader.find_patches()
    record = AttentionRecord(gradients=images.requires_grad, verify=not reader.is_checked)
    with record.watch(reader), capture_last_tokens(reader) as last_tokens:
        logits = run_whole(reader.model, images)
        _check_graph(reader.model, logits)
        pool_weights, tokens = measure_pool_weights(reader, last_tokens, logits)
    if not images.requires_grad:  # the graph was for the measurement alone
        logits, tokens = logits.detach(), tokens.detach()
    return Forward(reader, images, logits, record, pool_weights, num_prefix, grid, tokens)


def _run_without_attention(reader: ModelReader, images: Images) -> Forward:
    """Run a classifier, and record its last feature map if maps are read from one."""
    has_feature_map = reader.source == "feature map"
    if has_feature_map and not reader.is_checked:
        check_feature_map(reader.model, images[:1].detach())
    with record_outputs(reader.model) as outputs:
        logits = compute_logits(reader.model, images)
    if images.requires_grad:
        _check_graph(reader.model, logits)
    feature_map = parts = None
    if has_feature_map:
        ((_, feature_map),) = outputs
        parts = order_channels(feature_map, images)
    if parts is None:
        # parts of the image for maps of its pixels: 8 to 16 that divide a side, or 14
        rows, columns = (
            next((count for count in range(16, 7, -1) if side % count == 0), min(14, side))
            for side in images.shape[2:]
        )
        parts = images.new_empty(len(images), 0, rows, columns)
    grid = (parts.shape[2], parts.shape[3])
    tokens = parts.flatten(2).mT  # the parts take the role of patches
    # the mean over all of them, as in global average pooling
    pool_weights = logits.new_full(tokens.shape[:2], 1 / tokens.shape[1])
    record = AttentionRecord(gradients=False)
    return Forward(
        reader, images, logits, record, pool_weights, 0, grid, tokens, feature_map=feature_map
    )


def settle_source(reader: ModelReader, images: Images) -> None:
    """Find the source of a model's maps by its first image, unless that is done: its attention, or
    else a feature map. The reader keeps the answer, and why attention is refused. Raise ValueError
    if no maps are right."""
    if reader.is_checked:
        return
    if reader.has_attention:
        try:
            run_forward(reader, images[:1])
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, AttributeError, TypeError, LookupError) as error:
            reader.found.refusal = str(error) or repr(error)
    if not reader.has_attention:
        try:
            run_forward(reader, images[:1])
        except ValueError as error:
            raise ValueError(f"no maps: {reader.found.refusal}; {error}") from error
    reader.keep()


def draw_image(bundle: Bundle) -> Images:
    """Draw an image of noise for a bundle's model."""
    shape = (1, 3, *bundle.preprocess.image_size)
    return draw_noise(shape, next(bundle.model.parameters()))


def open_reader(bundle: Bundle) -> ModelReader:
    """Return a reader of a bundle's model, with its source settled by an image of noise."""
    image = draw_image(bundle)
    reader = read_model(bundle.model, image)
    settle_source(reader, image)
    # noise is no reason to refuse attention, so the model isn't searched again until it changes
    reader.keep(refusal=True)
    return reader


def differentiate(score: Numbers, tensor: Tensor) -> Tensor:
    """Compute ∂score/∂tensor in float32 or more. Images don't mix, so the gradient of the sum
    contains the gradient of each image. The graph is kept."""
    (gradient,) = torch.autograd.grad(score.sum(), tensor, retain_graph=True)
    return at_least_float32(gradient)
