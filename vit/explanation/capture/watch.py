"""See attention while a module computes it, however its code is written: torch's fused functions, or
a softmax whose result is multiplied with the values.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vit.model.logits import at_least_float32

Heads = Float[Tensor, "B H N K"]

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
# functions that give the weights another shape or type, or are off in evaluation mode
_UNCHANGED = {F.dropout, torch.dropout, torch.reshape, torch.flatten, torch.unflatten}
_UNCHANGED |= {Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten, Tensor.contiguous}
_UNCHANGED |= {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16}


# names of the arguments that may be given by position
_FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_PROJECTED = tuple(inspect.signature(F.multi_head_attention_forward).parameters)


class UnreadableError(ValueError):
    """Attention was seen, and it isn't known what its weights are."""


@dataclass
class AttentionCall:
    """One attention that a module computed: A·V = O for each head.

    Attributes:
        output: O as the module's code has it, in the autograd graph; with `projection`, its
            projection [N, B, D].
        arrange: From a tensor of the shape of `output` to [B, H, N, K], or [B, N, D].
        value: V of each query head.
        weights: A; None where it is computed from `query` and `key`.
        query, key: Queries, multiplied by the scale, and keys.
        bias: Number that is added to each score.
        projection: Weight and bias of a projection that is part of the same function.
    """

    output: Tensor
    arrange: Callable[[Tensor], Tensor]
    value: Heads
    weights: Tensor | None = None
    query: Float[Tensor, "B H Nq Kq"] | None = None
    key: Float[Tensor, "B H N Kq"] | None = None
    bias: Tensor | None = None
    projection: tuple[Tensor, Tensor | None] | None = None

    @property
    def num_queries(self) -> int:
        """Number of queries."""
        made = self.query if self.weights is None else self.weights
        assert made is not None
        return made.shape[2]

    def compute_weights(self, images: slice) -> Callable[[slice], Float[Tensor, "b H Nq N"]]:
        """Return a function from a few queries to the weights of some images, in float32 or
        more."""
        if self.weights is not None:
            weights = self.weights[images]
            return lambda rows: at_least_float32(weights[:, :, rows])
        assert self.query is not None
        assert self.key is not None
        query = at_least_float32(self.query[images])
        key = at_least_float32(self.key[images]).transpose(-2, -1)
        bias = self.bias
        if bias is not None:
            # [#B, #H, Nq, N], and one for each image may be different
            bias = bias.expand(*(1,) * (4 - bias.ndim), *bias.shape).to(query.dtype)
            bias = bias[images] if len(bias) > 1 else bias

        def attend(rows: slice) -> Tensor:
            scores = query[:, :, rows] @ key
            if bias is not None:
                scores = scores + (bias if bias.shape[2] == 1 else bias[:, :, rows])
            return softmax_in_place(scores)

        return attend

    def detach(self) -> "AttentionCall":
        """Return the attention outside of the autograd graph, without the output and the
        values."""
        tensors = {
            name: tensor.detach()
            for name in ("weights", "query", "key", "bias")
            if (tensor := getattr(self, name)) is not None
        }
        detached = replace(self, **tensors)
        # only gradients need them
        detached.output = self.output.new_empty(0)
        detached.value = self.value.new_empty(0, 0, 0, 0)
        return detached


def softmax_in_place(scores: Tensor) -> Tensor:
    """Compute the softmax over the last axis, in a graph out of place."""
    # new memory would double the time
    return torch.softmax(scores, dim=-1, out=None if scores.requires_grad else scores)


class AttentionWatch(TorchFunctionMode):
    """Context that passes each attention to `keep`.

    Args:
        batch: Number of images, which tells the heads of [B·H, N, N] apart.
        keep: Called with each attention.
        mixing: Weights [N, N] that every head has instead of its own. None: attention as the model
            computes it.
        num_keys: Number of tokens, of which a layer may compute some alone. None: all of them.
    """

    def __init__(
        self,
        batch: int,
        keep: Callable[[AttentionCall], object],
        *,
        mixing: Tensor | None = None,
        num_keys: int | None = None,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.keep = keep
        self.mixing = mixing
        self.num_keys = num_keys
        self._weights: list[Tensor] = []  # the result of the last softmax, in all its shapes
        # no method: a call that refers to the watch, and so to `keep`, might be kept in a circle,
        # and memory with it
        self._split = partial(_split_heads, batch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # other modes see the model's computations alone
        with torch._C.DisableTorchFunction():
            return self._read(result, func, args, kwargs)

    def _read(
        self, result: Any, func: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Look at the result of a function, and return it, or what it is with other weights."""
        mixing = self.mixing
        if func is F.scaled_dot_product_attention:
            call = self._read_fused(result, _bind(_FUSED, args, kwargs))
            if mixing is not None:
                mixed = mixing[: call.num_queries].to(call.value) @ call.value
                return mixed.reshape(result.shape)
            self._keep(call)
        elif func is F.multi_head_attention_forward:
            if mixing is not None:
                return (torch.einsum("qk,kbd->qbd", mixing.to(args[2]), args[2]), *result[1:])
            self._keep(self._read_projected(result[0], _bind(_PROJECTED, args, kwargs)))
        elif func in _SOFTMAX:
            if self._is_attention(result, *args, **kwargs):
                if mixing is not None:
                    result = mixing[: result.shape[-2]].to(result).expand_as(result)
                self._weights = [result]
        elif func in _UNCHANGED and self._is_weights(args[0]):
            self._weights.append(result)
        elif func in _PRODUCTS and self._is_weights(args[0]):
            self._keep(self._read_product(result, *args, **kwargs))
        elif func is torch.einsum:
            operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
            if any(map(self._is_weights, operands)):
                self._keep(self._read_einsum(result, args[0], *operands))
        return result

    def _keep(self, call: AttentionCall | None) -> None:
        if call is not None:
            self.keep(call)

    def _is_attention(
        self,
        result: Tensor,
        input: Tensor,
        dim: int | None = None,
        *others: Any,
        **options: Any,
    ) -> bool:
        """Return whether a softmax is over the keys of a matrix of attention."""
        if dim not in (-1, input.ndim - 1) or input.ndim <= 2:
            return False
        num_queries, num_keys = result.shape[-2:]
        return num_queries == num_keys > 1 or num_keys == self.num_keys

    def _is_weights(self, tensor: object) -> bool:
        return any(tensor is weights for weights in self._weights)

    def _read_fused(self, output: Tensor, arguments: dict[str, Any]) -> AttentionCall:
        """Read torch's `scaled_dot_product_attention`."""
        query, key, value = (arguments[name] for name in ("query", "key", "value"))
        scale = arguments.get("scale")
        if scale is None:
            scale = query.shape[-1] ** -0.5
        heads = [self._split(tensor) for tensor in (query, key, value)]
        num_heads = heads[0].shape[1]
        key, value = (self._repeat(tensor, num_heads) for tensor in heads[1:])
        mask = arguments.get("attn_mask")
        bias = None if mask is None else _as_bias(mask, query)
        if bias is not None and query.ndim == 3 and bias.ndim == 3:
            bias = self._split(bias)
        if arguments.get("is_causal"):
            allowed = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            bias = _as_bias(allowed, query)
        return AttentionCall(output, self._split, value, query=heads[0] * scale, key=key, bias=bias)

    @staticmethod
    def _repeat(tensor: Heads, num_heads: int) -> Float[Tensor, "B heads N K"]:
        """Repeat keys or values that heads share."""
        if tensor.shape[1] in (1, num_heads):
            return tensor.expand(-1, num_heads, -1, -1)
        return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)

    def _read_projected(
        self, output: Float[Tensor, "N B D"], arguments: dict[str, Any]
    ) -> AttentionCall:
        """Read `nn.MultiheadAttention`, which projects within the same function."""
        in_weight, in_bias = arguments["in_proj_weight"], arguments["in_proj_bias"]
        others = ("bias_k", "key_padding_mask", "q_proj_weight")
        is_plain = all(arguments.get(name) is None for name in others)
        if in_weight is None or output.ndim != 3 or arguments["add_zero_attn"] or not is_plain:
            raise UnreadableError(
                "nn.MultiheadAttention with kdim, add_bias_kv, add_zero_attn, key_padding_mask or "
                "without a batch can't be read"
            )
        biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
        inputs = (arguments[name] for name in ("query", "key", "value"))
        tensors = zip(inputs, in_weight.chunk(3), biases, strict=True)
        heads = (arguments["num_heads"], -1)
        # [N, B, D] to [B, H, N, K]
        query, key, value = (
            torch.unflatten(F.linear(tensor, weight, bias), -1, heads).permute(1, 2, 0, 3)
            for tensor, weight, bias in tensors
        )
        mask = arguments.get("attn_mask")
        bias = None if mask is None else _as_bias(mask, query)
        out_weight, out_bias = arguments["out_proj_weight"], arguments["out_proj_bias"]
        return AttentionCall(
            output,
            lambda tensor: tensor.transpose(0, 1),
            value,
            query=query * query.shape[-1] ** -0.5,
            key=key,
            bias=self._split(bias) if bias is not None and bias.ndim == 3 else bias,
            projection=(out_weight.detach(), None if out_bias is None else out_bias.detach()),
        )

    def _read_product(self, output: Tensor, weights: Tensor, value: Tensor) -> AttentionCall:
        """Read A @ V."""
        matrices = self._split(weights)
        if value.ndim == 3:
            value = value[:, None] if len(value) == self.batch else self._split(value)
        values = value.expand(*matrices.shape[:2], -1, -1)
        return AttentionCall(output, self._split, values, weights=matrices)

    def _read_einsum(
        self, output: Tensor, equation: str, *operands: Tensor
    ) -> AttentionCall | None:
        """Read a product of attention and values that is written as a sum over indices."""
        names, output_names = equation.replace(" ", "").split("->")
        terms = names.split(",")
        if not self._is_weights(operands[0]):
            operands = operands[::-1]
            terms = terms[::-1]
        weights, value = operands
        # letters in the place of an ellipsis
        leading = "XYZ"[: weights.ndim - len(terms[0].replace("...", ""))]
        term, value_term, output_term = (
            text.replace("...", leading) for text in (*terms, output_names)
        )
        batch, query, key = term[:-2], term[-2], term[-1]
        channels = [letter for letter in value_term if letter not in term]
        if len(channels) != 1 or sorted(output_term) != sorted(batch + query + channels[0]):
            return None  # the heads are mixed, or another sum

        order = [value_term.index(letter) for letter in batch if letter in value_term]
        values = value.permute(*order, value_term.index(key), value_term.index(channels[0]))
        for axis, letter in enumerate(batch):
            if letter not in value_term:  # heads that share their values
                values = values.unsqueeze(axis)
        matrices = self._split(weights)
        places = [output_term.index(letter) for letter in (*batch, query, *channels)]
        split = self._split
        return AttentionCall(
            output,
            lambda tensor: split(tensor.permute(places)),
            self._split(values.expand(*weights.shape[:-2], -1, -1)),
            weights=matrices,
        )


def _split_heads(batch: int, tensor: Tensor) -> Heads:
    """Arrange [B·H, N, K] as [B, H, N, K]."""
    if tensor.ndim == 3 and tensor.shape[0] % batch == 0:
        return torch.unflatten(tensor, 0, (batch, -1))
    if tensor.ndim != 4:
        raise UnreadableError(
            f"attention of the shape {list(tensor.shape)} isn't of batches and heads"
        )
    return tensor


def _bind(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return dict(zip(names, args, strict=False)) | kwargs


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    """Convert a mask that is True where keys are attended to, as a bias of the scores."""
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill(~mask, -torch.inf)
