"""See attention while a model computes it, however its code is written: torch's fused functions, or
a softmax whose result is multiplied with the values; and compute what maps need of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vit.model.logits import at_least_float32
from vit.runtime.device import count_bytes

# rows are queries, columns keys
Attention = Float[Tensor, "B H Nq N"]
Heads = Float[Tensor, "B H N K"]
_ALL = slice(None)

# number of attention weights in memory at once on a CPU: 8 MiB fit the cache
CHUNK_ELEMENTS = 2**21
# on a GPU, fraction of its memory for one such matrix, of which several exist at once: 0.6 GB of
# 80 GB
_CHUNK_FRACTION = 1 / 128
_VERIFIED_QUERIES = 64  # number of queries that are verified; all would need the N×N matrix

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
# functions that give the weights another shape or type, or are off in evaluation mode
_UNCHANGED = {F.dropout, torch.dropout, torch.reshape, torch.flatten, torch.unflatten}
_UNCHANGED |= {Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten, Tensor.contiguous}
_UNCHANGED |= {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16}

# torch's function of nn.MultiheadAttention with its own code, which doesn't hand it over to contexts
# as a whole
_WHOLE = F.multi_head_attention_forward
_STEPS = FunctionType(
    _WHOLE.__code__, vars(F) | {"has_torch_function": lambda _: False}, argdefs=_WHOLE.__defaults__
)


@dataclass
class AttentionLayer:
    """One attention that a model computed: A·V = O for each head.

    Attributes:
        output: O as the model's code has it; with gradients, in the autograd graph.
        axes: Order of its axes that puts images and heads first, queries and channels last.
        value: V of each query head.
        weights: A; None if it is computed from `query` and `key`.
        query, key: Queries, multiplied by the scale, and keys.
        bias: Number that is added to each score.
    """

    output: Tensor
    axes: Sequence[int]
    value: Heads
    weights: Tensor | None = None
    query: Float[Tensor, "B H Nq Kq"] | None = None
    key: Float[Tensor, "B H N Kq"] | None = None
    bias: Tensor | None = None

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
        """Return the attention outside of the graph, without what gradients alone need."""
        tensors = {
            name: tensor.detach()
            for name in ("weights", "query", "key", "bias")
            if (tensor := getattr(self, name)) is not None
        }
        key = tensors.get("key")
        # a part of one product for queries, keys and values would keep all of it in memory
        if key is not None and key.untyped_storage().nbytes() > key.nbytes:
            tensors["key"] = key.clone()
        value = self.value.new_empty(*self.value.shape[:3], 0)
        return replace(self, output=self.output.new_empty(0), value=value, **tensors)

    def attention(self, images: slice = _ALL, queries: slice = _ALL) -> Attention:
        """Compute the weights after the softmax, in float32 or more, in the graph of the layer."""
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
        """Yield the weights of a few queries at a time, with their numbers: for 4,096 tokens and 12
        heads the whole matrix takes 0.8 GB for each image."""
        for rows in self._divide(self.shape[2], self.num_heads * self.num_tokens):
            with torch.no_grad():
                attention = self.attention(images, rows)
            yield rows, attention

    def in_chunks(self, compute: Callable[[slice], Tensor]) -> Tensor:
        """Call `compute` on as many images at a time as can have their attention matrices of this
        layer in memory."""
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
    """Return the largest relative error; half precision rounds queries and keys before the
    product."""
    is_rounded = torch.is_autocast_enabled(tensor.device.type)
    is_exact = tensor.dtype in (torch.float32, torch.float64) and not is_rounded
    return 1e-3 if is_exact else 5e-2


class ForwardWatch(TorchFunctionMode):
    """Context that sees each attention of a forward pass, and each result with three axes. By their
    numbers, layers and the tokens between them are known again in another pass.

    Attributes:
        batch: Number of images, which tells the heads of [B·H, N, N] apart.
        num_tokens: Number of tokens, of which a layer may compute some alone. 0: all of them.
        num_results: Number of results with three axes before the current one.
        num_attentions: Number of attentions before the current one.
    """

    def __init__(self, batch: int = 1) -> None:
        super().__init__()
        self.batch = batch
        self.num_tokens = 0
        self.begin()

    def begin(self, *_: object) -> None:
        """Begin a forward pass."""
        self.num_results = self.num_attentions = 0
        self._weights: list[Tensor] = []  # the result of the last softmax, in all its shapes

    def see_attention(self, layer: AttentionLayer) -> Tensor:
        """Look at an attention, and return what the model goes on with instead of its output."""
        raise NotImplementedError

    def see_result(self, result: Tensor) -> Tensor:
        """Look at a result with three axes, and return what the model goes on with."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _WHOLE:
            with self:
                return _STEPS(*args, **kwargs)
        result = func(*args, **kwargs)
        # Calls from here are not the model's.
        with torch._C.DisableTorchFunction():
            layer = self._read(result, func, args, kwargs)
            if layer is not None:
                result = self.see_attention(layer)
                self.num_attentions += 1
            if has_three_axes(result):
                result = self.see_result(result)
                self.num_results += 1
            return result

    def _read(
        self, result: Any, func: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AttentionLayer | None:
        """Return the attention whose output is the result of a function, if it is one."""
        if func is F.scaled_dot_product_attention:
            return _read_fused(self.batch, result, *args, **kwargs)
        if func in _SOFTMAX:
            if self._is_attention(result, *args, **kwargs):
                self._weights = [result]
        elif func in _UNCHANGED and self._is_weights(args[0]):
            self._weights.append(result)
        elif func in _PRODUCTS and self._is_weights(args[0]):
            return _read_product(self.batch, result, range(result.ndim), *args, **kwargs)
        elif func is torch.einsum:
            operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
            terms = args[0].replace(" ", "").replace("->", ",").split(",")
            if any(map(self._is_weights, operands[1:])):
                operands = operands[::-1]
                terms = [*terms[-2::-1], terms[-1]]
            if self._is_weights(operands[0]):
                return _read_einsum(self.batch, result, terms, *operands)
        return None

    def _is_attention(
        self, result: Tensor, input: Tensor, dim: int | None = None, *_: Any, **options: Any
    ) -> bool:
        """Return whether a softmax is over the keys of a matrix of attention."""
        if dim not in (-1, input.ndim - 1) or input.ndim <= 2:
            return False
        num_queries, num_keys = result.shape[-2:]
        return num_queries == num_keys > 1 or num_keys == self.num_tokens

    def _is_weights(self, tensor: object) -> bool:
        return any(tensor is weights for weights in self._weights)


def has_three_axes(value: object) -> bool:
    """Return whether something may be tokens [B, N, D]."""
    return isinstance(value, Tensor) and value.ndim == 3


def _read_fused(
    batch: int,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    **options: Any,
) -> AttentionLayer:
    """Read torch's `scaled_dot_product_attention`."""
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), others, strict=False)) | options
    bias, scale = options.get("attn_mask"), options.get("scale")
    if options.get("is_causal"):
        bias = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if bias is not None and bias.dtype == torch.bool:  # True where keys are attended to
        zeros = torch.zeros(bias.shape, dtype=query.dtype, device=query.device)
        bias = zeros.masked_fill(~bias, -torch.inf)
    if bias is not None and query.ndim == bias.ndim == 3:
        bias = _split_heads(bias, batch)
    query, key, value = (_split_heads(tensor, batch) for tensor in (query, key, value))
    num_heads = query.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return AttentionLayer(
        output,
        range(output.ndim),
        _share_heads(value, num_heads),
        query=query * scale,
        key=_share_heads(key, num_heads),
        bias=bias,
    )


def _read_product(
    batch: int, output: Tensor, axes: Sequence[int], weights: Tensor, values: Tensor
) -> AttentionLayer:
    """Read A @ V, see `AttentionLayer` for the axes. Heads may share their values."""
    leading = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        weights.shape[:-2], values.shape[:-2]
    )
    weights = _split_heads(weights, batch)
    values = _split_heads(values.expand(*leading, -1, -1), batch)
    return AttentionLayer(output, axes, values, weights=weights)


def _read_einsum(
    batch: int, output: Tensor, terms: Sequence[str], weights: Tensor, value: Tensor
) -> AttentionLayer | None:
    """Read a product of attention and values that is written as a sum over indices."""
    # letters in the place of an ellipsis
    leading = "XYZ"[: weights.ndim - len(terms[0].replace("...", ""))]
    term, value_term, output_term = (text.replace("...", leading) for text in terms)
    rows, key = term[:-1], term[-1]
    channels = "".join(letter for letter in value_term if letter not in term)
    if len(channels) != 1 or sorted(output_term) != sorted(rows + channels):
        return None  # the heads are mixed, or another sum

    own = "".join(letter for letter in rows[:-1] if letter in value_term)
    values = value.permute([value_term.index(letter) for letter in own + key + channels])
    for axis, letter in enumerate(rows[:-1]):
        if letter not in own:
            values = values.unsqueeze(axis)
    axes = [output_term.index(letter) for letter in rows + channels]
    return _read_product(batch, output, axes, weights, values)


def _split_heads(tensor: Tensor, batch: int) -> Heads:
    """Arrange [B·H, N, K] as [B, H, N, K]."""
    if tensor.ndim == 3 and tensor.shape[0] % batch == 0:
        return torch.unflatten(tensor, 0, (batch, -1))
    if tensor.ndim != 4:
        raise ValueError(f"attention of the shape {list(tensor.shape)} isn't of batches and heads")
    return tensor


def _share_heads(tensor: Heads, num_heads: int) -> Float[Tensor, "B heads N K"]:
    """Repeat keys or values that heads share."""
    if tensor.shape[1] in (1, num_heads):
        return tensor.expand(-1, num_heads, -1, -1)
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)
