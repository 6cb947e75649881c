"""One attention layer of a forward pass, and what maps need of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from vit.model.logits import at_least_float32
from vit.runtime.device import count_bytes

# rows are queries, columns keys
Attention = Float[Tensor, "B H Nq N"]
Heads = Float[Tensor, "B H N K"]
_ALL = slice(None)

# number of attention weights in memory at once on a CPU: 8 MiB fit the cache and are enough work
# for one call
CHUNK_ELEMENTS = 2**21
# on a GPU, fraction of its memory for one such matrix, of which several exist at once: 0.6 GB of
# 80 GB
_CHUNK_FRACTION = 1 / 128
_VERIFIED_QUERIES = 64  # number of queries that are verified; all would need the N×N matrix


@dataclass
class AttentionLayer:
    """One attention that a model computed: A·V = O for each head.

    Attributes:
        output: O as the model's code has it; with gradients, in the autograd graph.
        axes: Order of its axes that puts images and heads first, queries and channels last.
        value: V of each query head.
        weights: A; None where it is computed from `query` and `key`.
        query, key: Queries, multiplied by the scale, and keys.
        bias: Number that is added to each score.
        block_input: Tokens [B, N, D] that enter its block; only with gradients.
    """

    output: Tensor
    axes: Sequence[int]
    value: Heads
    weights: Tensor | None = None
    query: Float[Tensor, "B H Nq Kq"] | None = None
    key: Float[Tensor, "B H N Kq"] | None = None
    bias: Tensor | None = None
    block_input: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Number of images, heads, queries and keys."""
        if self.weights is not None:
            return self.weights.shape
        assert self.query is not None
        assert self.key is not None
        return torch.Size((*self.query.shape[:3], self.key.shape[2]))

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.shape[1]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are attended to."""
        return self.shape[3]

    def arrange(self, tensor: Tensor) -> Heads:
        """Arrange a tensor of the shape of the output, whose heads may be in the batch."""
        return tensor.permute(*self.axes).reshape(*self.shape[:3], -1)

    def restore(self, heads: Heads) -> Tensor:
        """Arrange heads as the output is."""
        permuted = heads.reshape([self.output.shape[axis] for axis in self.axes])
        return permuted.permute([self.axes.index(axis) for axis in range(permuted.ndim)])

    def detach(self) -> "AttentionLayer":
        """Return the attention outside of the autograd graph, without the output and the values,
        which gradients alone need."""
        tensors = {
            name: tensor.detach()
            for name in ("weights", "query", "key", "bias")
            if (tensor := getattr(self, name)) is not None
        }
        value = self.value.new_empty(*self.value.shape[:3], 0)
        return replace(self, output=self.output.new_empty(0), value=value, **tensors)

    def attention(self, images: slice = _ALL, queries: slice = _ALL) -> Attention:
        """Compute the weights after the softmax, in float32 or more. They are in the autograd graph
        if the layer is."""
        if self.weights is not None:
            return at_least_float32(self.weights[images, :, queries])
        assert self.query is not None
        assert self.key is not None
        query = at_least_float32(self.query[images, :, queries])
        scores = query @ at_least_float32(self.key[images]).mT
        if self.bias is not None:
            bias = self.bias.to(scores.dtype).expand(self.shape)
            scores = scores + bias[images, :, queries]
        # in place where there is no graph, because new memory would double the time
        return torch.softmax(scores, dim=-1, out=None if scores.requires_grad else scores)

    @torch.no_grad()
    def attend(
        self, pool_weights: Float[Tensor, "B N"], images: slice = _ALL
    ) -> Float[Tensor, "b H N"]:
        """Compute what the pooled feature attends to in each head, uᵀA."""
        weights = at_least_float32(pool_weights[images])[:, None, None]  # [b, 1, 1, N]
        return (weights @ self.attention(images))[:, :, 0]

    def attention_rows(self, images: slice) -> Iterator[tuple[slice, Attention]]:
        """Yield the weights of a few queries at a time, with their places: for 4,096 tokens and 12
        heads the whole matrix takes 0.8 GB for each image."""
        for rows in self._divide(self.shape[2], self.num_heads * self.num_tokens):
            with torch.no_grad():
                attention = self.attention(images, rows)
            yield rows, attention

    def in_chunks(self, compute: Callable[[slice], Tensor]) -> Tensor:
        """Call `compute` on a few images of the batch at a time, as many as can have their attention
        matrices of this layer in memory."""
        parts = self._divide(self.shape[0], self.num_heads * self.num_tokens**2)
        return torch.cat([compute(images) for images in parts])

    def _divide(self, count: int, num_weights: int) -> list[slice]:
        """Divide what needs so many attention weights each into parts that fit into memory."""
        chunk = CHUNK_ELEMENTS
        device = self.output.device
        if device.type != "cpu":
            chunk = max(int(_CHUNK_FRACTION * count_bytes(device)[1]) // 4, chunk)  # float32
        step = max(chunk // num_weights, 1)
        return [slice(start, start + step) for start in range(0, count, step)]

    def gradient_and_value(
        self, heads_gradient: Tensor, images: slice = _ALL
    ) -> tuple[Float[Tensor, "b H Nq K"], Float[Tensor, "b H N K"]]:
        """Return ∂f/∂O and V, in float32 or more. The gradient of A is (∂f/∂O) Vᵀ in each head."""
        gradient = at_least_float32(self.arrange(heads_gradient)[images])
        return gradient, at_least_float32(self.value.detach()[images])

    @torch.no_grad()
    def verify(self, name: str) -> None:
        """Raise ValueError if the first queries of the first image aren't A·V."""
        first_image, queries = slice(1), slice(_VERIFIED_QUERIES)
        expected = self.attention(first_image, queries) @ at_least_float32(self.value[first_image])
        actual = at_least_float32(self.arrange(self.output)[first_image, :, queries])
        error = (expected - actual).abs().max()
        if not error <= find_tolerance(self.output) * actual.abs().max():
            raise ValueError(
                f"{name} computes something else than softmax(q kᵀ)·v, so its attention is unknown"
            )


def find_tolerance(tensor: Tensor) -> float:
    """Return the largest relative error; half precision, also that of autocast, rounds queries and
    keys before the product."""
    is_rounded = torch.is_autocast_enabled(tensor.device.type)
    is_exact = tensor.dtype in (torch.float32, torch.float64) and not is_rounded
    return 1e-3 if is_exact else 5e-2
