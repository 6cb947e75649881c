"""Read one attention layer of a model of any code, while the model runs."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vit.explanation.capture.watch import AttentionCall, AttentionWatch
from vit.model.logits import at_least_float32
from vit.runtime.device import count_total_bytes

# rows are queries, columns keys
Attention = Float[Tensor, "B H Nq N"]
_ALL = slice(None)

# number of attention weights in memory at once on a CPU: 8 MiB fit the cache and are enough work
# for one call
CHUNK_ELEMENTS = 2**21
# on a GPU, fraction of its memory for one such matrix, of which several exist at once: 0.6 GB of
# 80 GB
_CHUNK_FRACTION = 1 / 128
_VERIFIED_QUERIES = 64  # number of queries that are verified; all would need the N×N matrix


class LayerPlace(NamedTuple):
    """Where an attention layer is in a model.

    Attributes:
        name: Name of the module that computes attention.
        block: Name of the module that takes and gives tokens, often with the attention's addition.
        num_heads: Number of heads.
        tokens_first: True if the block takes [tokens, batch, channels].
    """

    name: str
    block: str
    num_heads: int
    tokens_first: bool = False

    def order(self, tokens: Tensor) -> Tensor:
        """Exchange [tokens, batch, channels] and [batch, tokens, channels], if the block takes the
        former."""
        return tokens.transpose(0, 1) if self.tokens_first else tokens


class AttentionLayer:
    """One attention layer, and the tensors of it that the last forward pass left. Its attention is
    seen while it is computed, see `watch`.

    Attributes:
        batch, num_tokens: Number of images, and of tokens of each.
        num_queries: Number of rows of the attention.
        num_calls: How often it ran in this forward pass.
        call: The attention; with gradients, in the autograd graph.
        heads: Result of the heads in the autograd graph; only with gradients.
        block_input: Tokens [B, N, D] that enter its block; only with gradients.
    """

    def __init__(self, model: nn.Module, place: LayerPlace) -> None:
        self.name = place.name
        self.module = model.get_submodule(place.name)
        self.block = model.get_submodule(place.block)
        self.num_heads = place.num_heads
        self.captured = False
        self.batch = self.num_tokens = self.num_queries = self.num_calls = 0
        self.heads: Tensor | None = None
        self.block_input: Tensor | None = None
        self._verified = False
        self._call: AttentionCall | None = None

    @property
    def call(self) -> AttentionCall:
        """The module's computation in the last forward pass."""
        assert self._call is not None
        return self._call

    @property
    def chunk_elements(self) -> int:
        """Number of attention weights in memory at once."""
        device = next(self.block.parameters()).device
        if device.type == "cpu":
            return CHUNK_ELEMENTS
        num_elements = int(_CHUNK_FRACTION * count_total_bytes(device)) // 4  # in float32
        return max(num_elements, CHUNK_ELEMENTS)

    @torch.no_grad()
    def attention(self, images: slice = _ALL, queries: slice = _ALL) -> Attention:
        """Compute the weights after the softmax; rows are queries and sum to one."""
        return self.call.compute_weights(images)(queries)

    def attend(
        self, pool_weights: Float[Tensor, "B N"], images: slice = _ALL
    ) -> Float[Tensor, "b H N"]:
        """Compute what the pooled feature attends to in each head, uᵀA."""
        weights = at_least_float32(pool_weights[images])[:, None, None]  # [b, 1, 1, N]
        return (weights @ self.attention(images))[:, :, 0]

    def attention_rows(self, images: slice) -> Iterator[tuple[slice, Attention]]:
        """Compute `attention` for a few queries at a time, and yield it with their places.

        For 4,096 tokens and 12 heads the whole matrix takes 0.8 GB for each image.
        """
        with torch.no_grad():
            attend = self.call.compute_weights(images)
        step = max(self.chunk_elements // (self.num_heads * self.num_tokens), 1)
        for start in range(0, self.num_queries, step):
            rows = slice(start, start + step)
            with torch.no_grad():
                attention = attend(rows)
            yield rows, attention

    def in_chunks(self, compute: Callable[[slice], Tensor]) -> Tensor:
        """Call `compute` on a few images of the batch at a time, so that their attention matrices
        of this layer together have about `chunk_elements` numbers."""
        size = max(self.chunk_elements // (self.num_heads * self.num_tokens**2), 1)
        starts = range(0, self.batch, size)
        return torch.cat([compute(slice(start, start + size)) for start in starts])

    def gradient_and_value(
        self, heads_gradient: Tensor, images: slice
    ) -> tuple[Float[Tensor, "b H Nq K"], Float[Tensor, "b H N K"]]:
        """Return ∂f/∂O and V; at least float32."""
        gradient = at_least_float32(self.call.arrange(heads_gradient)[images])
        if self.call.projection is not None:
            # because the projection W is linear, ∂f/∂O is ∂f/∂result · W
            gradient = gradient @ at_least_float32(self.call.projection[0])
            gradient = torch.unflatten(gradient, -1, (self.num_heads, -1)).transpose(1, 2)
        return gradient, at_least_float32(self.call.value.detach()[images])

    def attention_gradient(self, heads_gradient: Tensor, images: slice = _ALL) -> Attention:
        """∂f/∂A = (∂f/∂O) Vᵀ, per head."""
        gradient, value = self.gradient_and_value(heads_gradient, images)
        return gradient @ value.transpose(-2, -1)

    def begin(self, tokens: Float[Tensor, "B N D"]) -> None:
        """Begin a forward pass of these tokens, without what the pass before has left."""
        self.captured = False
        self.batch, self.num_tokens = tokens.shape[:2]

    @contextmanager
    def record(self, *, gradients: bool, verify: bool) -> Iterator[None]:
        """Keep what the module computes; with `gradients`, in the autograd graph."""
        self._verified = not verify

        def keep(call: AttentionCall) -> None:
            self.num_queries, self.num_tokens = call.num_queries, call.value.shape[2]
            if not self._verified and not self.module.training:
                self._verify(call)
            self.heads = call.output if gradients else None
            self._call = call if gradients else call.detach()
            self.captured = True

        def on_input(module: nn.Module, args: object) -> None:
            self.captured = False
            self.num_calls += 1

        with self.module.register_forward_pre_hook(on_input), self.watch(keep):
            yield

    @contextmanager
    def watch(
        self, keep: Callable[[AttentionCall], object], *, mixing: Tensor | None = None
    ) -> Iterator[None]:
        """Let `AttentionWatch` see what the module computes; with `mixing`, with these weights."""
        running: list[AttentionWatch] = []

        def begin(module: nn.Module, args: object) -> None:
            watch = AttentionWatch(self.batch, keep, mixing=mixing, num_keys=self.num_tokens)
            running.append(watch)
            watch.__enter__()  # type: ignore[no-untyped-call]

        def end(module: nn.Module, args: object, result: object) -> None:
            # also where the module has raised an error
            if running:
                running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

        with ExitStack() as stack:
            handles: list[RemovableHandle] = [
                self.module.register_forward_pre_hook(begin),
                self.module.register_forward_hook(end, always_call=True),
            ]
            for handle in handles:
                stack.enter_context(handle)
            yield

    @torch.no_grad()
    def _verify(self, call: AttentionCall) -> None:
        """Compare the first queries of the first image with A·V."""
        first_image = slice(1)
        actual = at_least_float32(call.arrange(call.output)[first_image])
        attention = call.compute_weights(first_image)(slice(_VERIFIED_QUERIES))
        expected = attention @ at_least_float32(call.value[first_image])
        if call.projection is not None:
            weight, bias = call.projection
            expected = expected.transpose(1, 2).flatten(2) @ at_least_float32(weight).mT
            expected = expected if bias is None else expected + bias
        actual = actual[..., : expected.shape[-2], :]
        error = (expected - actual).abs().max()
        if not error <= _tolerance(call.output) * actual.abs().max():
            raise ValueError(
                f"{self.name} computes something else than softmax(q kᵀ)·v, so its attention is "
                "unknown"
            )
        self._verified = True


def run_as_written() -> AbstractContextManager[object]:
    """Let compiled parts of a model run as they are written, because their code can't be watched."""
    # nothing is compiled before the compiler is imported, which takes a second
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Let `nn.TransformerEncoderLayer` call its attention, which its fast path computes itself."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def check_calls(layers: Sequence[AttentionLayer]) -> None:
    """Raise ValueError if a layer ran more than once in a forward pass."""
    for layer in layers:
        if layer.num_calls > 1:
            raise ValueError(
                f"{layer.name} runs {layer.num_calls} times in one forward pass (test-time "
                "augmentation, or a shared layer?), and a map shows one; pass a model that runs it once"
            )


def _tolerance(tensor: Tensor) -> float:
    """Return the largest relative error; half precision rounds queries and keys before the
    product."""
    return 1e-3 if tensor.dtype in (torch.float32, torch.float64) else 5e-2


def first_output(result: Any) -> Tensor:
    """Return a module's result, or the first of several."""
    return cast("Tensor", result[0] if isinstance(result, tuple) else result)
