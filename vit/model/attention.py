"""Attention: the formula, its masks, and the multi-head layer that every encoder block uses.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V            (Vaswani et al. 2017, equation 1)

Masks: True (or 1) is attended to, False (or 0) ignored. A query whose keys are all ignored gets zero weights and a zero
output, not NaN and not a uniform average.
"""

from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vit.runtime.arguments import check_choice
from vit.runtime.compiler import constant_when_compiled
from vit.runtime.device import cpu_flags

Backend = Literal["auto", "fused", "explicit"]
Mask = Shaped[Tensor, "..."] | None  # boolean, or integers 0 and 1; others are refused with a sentence
Queries = Float[Tensor, "B Nq D"]
Keys = Float[Tensor, "B Nk D"] | None

NORM_EPS = 1e-6  # of every LayerNorm in the field's vision transformers; torch's own default is 1e-5


def scaled_dot_product_attention(
    query: Float[Tensor, "... Nq K"],
    key: Float[Tensor, "... Nk K"],
    value: Float[Tensor, "... Nk V"],
    mask: Mask = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "... Nq V"], Float[Tensor, "... Nq Nk"]]:
    """The formula itself: the output, and the weights that made it. Masks as in `compute_weights`."""
    weights = compute_weights(query, key, mask, causal=causal)
    return weights @ value, weights


def compute_weights(
    query: Float[Tensor, "... Nq K"], key: Float[Tensor, "... Nk K"], mask: Mask = None, *, causal: bool = False
) -> Float[Tensor, "... Nq Nk"]:
    """softmax(Q Kᵀ / √d_k): each row a distribution over the keys. A dot product of d_k entries of unit variance has
    variance d_k; dividing by √d_k keeps the softmax from saturating (Vaswani et al. 2017, footnote 4).

    `mask`: boolean or 0/1 integers, of any shape that broadcasts to the weights. `causal`: query i attends to keys
    0…i, counted from the upper left corner when the lengths differ, as in torch; combines with `mask`.
    """
    scores: Tensor = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # [..., Nq, Nk]
    allowed = _allowed(mask, shape=scores.shape, causal=causal, device=scores.device)
    if allowed is None:
        return scores.softmax(dim=-1)
    # The lowest finite number and not -inf: a row without any key then stays finite, in its gradient too,
    # until the second line empties it.
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~allowed, 0.0)


def mask_from_key_padding(padding: Shaped[Tensor, "B Nk"]) -> Bool[Tensor, "B 1 1 Nk"]:
    """Our mask from torch's `key_padding_mask`, where True is what to ignore."""
    if padding.dtype != torch.bool:
        raise ValueError(f"a key padding mask is boolean (True = ignored), not {padding.dtype}; use padding.bool()")
    return ~padding[:, None, None, :]


def choose_backend(device_type: str, dtype: torch.dtype, num_tokens: int, training: bool) -> Backend:
    """The faster of torch's fused kernel and two explicit products, as `benchmarks/attention.py` measures them: fused
    but for bfloat16 on a CPU, where the fused backward pass takes two to five times as long and, without AMX,
    inference is slower too. Beyond a few hundred tokens the explicit weights exceed caches and memory."""
    if device_type != "cpu" or dtype != torch.bfloat16 or num_tokens > 640:
        return "fused"
    return "explicit" if training or not _has_amx() else "fused"


@constant_when_compiled
def _has_amx() -> bool:
    return "amx_bf16" in cpu_flags()


class _AttentionFunction(torch.autograd.Function):
    """The formula for training on a CPU, with its backward pass written out for speed: each operand is copied into the
    products' layout once, and the products take the factor 1 / √d_k."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in (query, key, value))  # [B·H, N, K]
        weights = _multiply(q, k.mT, scale=q.shape[-1] ** -0.5).softmax(dim=-1)
        ctx.save_for_backward(q, k, v, weights)
        return torch.unflatten(weights @ v, 0, query.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        q, k, v, weights = ctx.saved_tensors
        scale, g = q.shape[-1] ** -0.5, gradient.flatten(0, 1)
        scores = torch.ops.aten._softmax_backward_data(g @ v.mT, weights, -1, weights.dtype)
        parts = _multiply(scores, k, scale=scale), _multiply(scores.mT, q, scale=scale), weights.mT @ g
        return tuple(torch.unflatten(part, 0, gradient.shape[:2]) for part in parts)


def _multiply(left: Float[Tensor, "M R I"], right: Float[Tensor, "M I C"], *, scale: float) -> Float[Tensor, "M R C"]:
    """scale · left @ right, rounded once."""
    ignored = left.new_empty(()).expand(left.shape[0], left.shape[1], right.shape[2])
    return torch.baddbmm(ignored, left, right, beta=0, alpha=scale)


class MultiHeadAttention(nn.Module):
    """Heads attend in parallel, each in its slice of the width; their outputs are concatenated, then projected.
    Self-attention when called with `query` alone, cross-attention when `key` and `value` are given. The projections
    of query, key and value are the three thirds of `qkv`, which is timm's layout and torch's `in_proj_weight`."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            fitting = [heads for heads in range(1, embed_dim + 1) if embed_dim % heads == 0]
            near = map(str, sorted(sorted(fitting, key=lambda heads: abs(heads - num_heads))[:2]))
            raise ValueError(f"num_heads {num_heads} does not divide embed_dim {embed_dim}; try {' or '.join(near)}")
        check_choice(backend, get_args(Backend), name="attention backend")
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scale = self.head_dim**-0.5
        self.backend: Backend = backend
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=NORM_EPS) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias)

    def forward(
        self, query: Queries, key: Keys = None, value: Keys = None, mask: Mask = None, *, causal: bool = False
    ) -> Float[Tensor, "B Nq D"]:
        """The output alone, by the faster backend. Mask and causality as in `compute_weights`, per [B, H, Nq, Nk]."""
        q, k, v = self._project(query, key, value)
        backend = self.backend
        if backend == "auto":
            training = torch.is_grad_enabled() and v.requires_grad
            backend = choose_backend(v.device.type, v.dtype, v.shape[-2], training)
        dropout = self.attn_drop.p if self.training else 0.0
        if backend == "explicit" and self.training and mask is None and not causal and not dropout:
            return self._merge(_AttentionFunction.apply(q, k, v))
        if backend == "explicit":
            return self._merge(self.attn_drop(compute_weights(q, k, mask, causal=causal)) @ v)
        if mask is None:
            return self._merge(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal))
        allowed = _allowed(mask, shape=torch.Size((*q.shape[:-1], k.shape[-2])), causal=causal, device=q.device)
        assert allowed is not None
        # fused kernels disagree on rows without keys: give them keys, drop the result
        empty = ~allowed.any(dim=-1, keepdim=True)
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed | empty, dropout_p=dropout)
        return self._merge(context.masked_fill(empty, 0.0))

    def forward_with_weights(
        self, query: Queries, key: Keys = None, value: Keys = None, mask: Mask = None, *, causal: bool = False
    ) -> tuple[Float[Tensor, "B Nq D"], Float[Tensor, "B H Nq Nk"]]:
        """The output and every head's weights, as they are before dropout: rows sum to one."""
        q, k, v = self._project(query, key, value)
        weights = compute_weights(q, k, mask, causal=causal)
        return self._merge(self.attn_drop(weights) @ v), weights

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """The same layer as torch's, with its weights. Inputs and outputs here are always batch first."""
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError("only kdim = vdim = embed_dim, neither add_bias_kv nor add_zero_attn, converts")
        biased = module.in_proj_bias is not None
        layer = cls(module.embed_dim, module.num_heads, qkv_bias=biased, proj_bias=biased, attn_drop=module.dropout)
        theirs = module.state_dict()
        ours = {name.replace("in_proj_", "qkv.").replace("out_proj", "proj"): theirs[name] for name in theirs}
        layer.to(module.in_proj_weight).load_state_dict(ours)
        return layer.train(module.training)

    def _project(self, query: Queries, key: Keys, value: Keys) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of every head: [B, H, N, K] each."""
        if key is None and value is None:
            heads = self.qkv(query).reshape(*query.shape[:2], 3, self.num_heads, self.head_dim)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # from [B, N, 3, H, K]
        elif key is None or value is None:
            raise ValueError("cross-attention needs both key and value; self-attention neither")
        else:
            biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
            q, k, v = (
                F.linear(tokens, weight, bias).reshape(*tokens.shape[:2], self.num_heads, -1).transpose(1, 2)
                for tokens, weight, bias in zip((query, key, value), self.qkv.weight.chunk(3), biases, strict=True)
            )
        return self.q_norm(q), self.k_norm(k), v

    def _merge(self, context: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N D"]:
        return cast(Tensor, self.proj(context.transpose(1, 2).flatten(2)))  # heads side by side: [B, N, H·K]


def _allowed(mask: Mask, *, shape: torch.Size, causal: bool, device: torch.device) -> Bool[Tensor, "..."] | None:
    """Where weights of this shape may be non-zero; None: everywhere. The result broadcasts to `shape`."""
    allowed = None
    if mask is not None:
        if mask.is_floating_point():
            cure = "of one that adds -inf to what it ignores, pass (mask == 0)"
            raise ValueError(f"an attention mask is boolean, True = attend, not {mask.dtype}; {cure}")
        is_checked = mask.dtype == torch.bool or torch.compiler.is_compiling()
        if not is_checked and ((mask != 0) & (mask != 1)).any():
            span = f"from {mask.min()} to {mask.max()}"
            raise ValueError(f"an integer attention mask holds 0 and 1, this one goes {span}")
        sides = zip(reversed(mask.shape), reversed(shape), strict=False)
        if mask.ndim > len(shape) or any(side not in (1, whole) for side, whole in sides):
            raise ValueError(f"mask {list(mask.shape)} does not broadcast to the attention weights {list(shape)}")
        allowed = mask.bool()
    if causal:
        triangle = torch.ones(shape[-2:], dtype=torch.bool, device=device).tril()
        allowed = triangle if allowed is None else allowed & triangle
    return allowed
