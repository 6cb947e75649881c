"""Attention: the formula, and the multi-head layer that every encoder block uses.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V            (Vaswani et al. 2017, equation 1)

Masks: True (or 1) is attended to, False (or 0) ignored. A query whose keys are all ignored gets
zero weights and a zero output, not NaN and not a uniform average.
"""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from vit.runtime.arguments import check_choice
from vit.runtime.device import cpu_flags
from vit.runtime.threads import constant_when_compiled

Backend = Literal["auto", "fused", "explicit"]
# Boolean, or integers 0 and 1, of a shape that broadcasts to the weights. None: no key is ignored.
Mask = Shaped[Tensor, "..."] | None
Queries = Float[Tensor, "B Nq D"]
Keys = Float[Tensor, "B Nk D"] | None

# Vision transformers use this epsilon in every LayerNorm; torch's own default is 1e-5.
NORM_EPS = 1e-6
# Beyond a few hundred tokens, explicit weights exceed a processor's caches.
MAX_EXPLICIT_TOKENS = 640


def scaled_dot_product_attention(
    query: Float[Tensor, "... Nq K"],
    key: Float[Tensor, "... Nk K"],
    value: Float[Tensor, "... Nk V"],
    mask: Mask = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "... Nq V"], Float[Tensor, "... Nq Nk"]]:
    """The formula itself (Vaswani et al. 2017, equation 1).

    A dot product of d_k entries of unit variance has variance d_k; dividing by √d_k keeps the
    softmax from saturating (footnote 4 of the paper).

    Args:
        query, key, value: With any leading axes.
        mask: See `Mask`.
        causal: Query i attends to keys 0…i, counted from the upper left corner when the lengths
            differ, as in torch. Combines with `mask`.

    Returns:
        The output, and the weights that made it: each row is a distribution over the keys, or
        zeros where all are ignored.

    Raises:
        ValueError: The mask is floating point.
        RuntimeError: The shapes don't fit each other.
    """
    if mask is not None and mask.is_floating_point():
        raise ValueError(
            f"an attention mask is boolean, True = attend, not {mask.dtype}; "
            "for a mask that adds -inf, pass (mask == 0)"
        )
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # [..., Nq, Nk]
    if mask is None and not causal:
        weights = scores.softmax(dim=-1)
        return weights @ value, weights

    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        # A larger mask would enlarge the weights. torch refuses to expand it to their shape.
        allowed = allowed & mask.bool().expand(scores.shape)
    # The lowest finite number instead of -inf: a row without any key then stays finite, and so does
    # its gradient, until the second line sets it to zero.
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(dim=-1)
    weights = weights.masked_fill(~allowed, 0.0)
    return weights @ value, weights


def build_norm(width: int, *, enabled: bool = True) -> nn.Module:
    """Build a LayerNorm with the usual epsilon, or an Identity if it is not enabled."""
    return nn.LayerNorm(width, eps=NORM_EPS) if enabled else nn.Identity()


class MultiHeadAttention(nn.Module):
    """Heads attend in parallel, each in its slice of the width; their outputs are concatenated,
    then projected (Vaswani et al. 2017, section 3.2.2).

    Self-attention when called with `query` alone, cross-attention when `key` and `value` are given.
    The projections of query, key and value are the three thirds of `qkv`, as in timm. In
    `nn.MultiheadAttention` this is `in_proj_weight`, and `proj` is `out_proj`.

    Args:
        embed_dim: Width of the tokens, D.
        num_heads: Number of heads, H, which divides the width.
        qkv_bias, proj_bias: Give the projections biases.
        qk_norm: LayerNorm of each head's queries and keys (Dehghani et al. 2023).
        backend: "fused" is torch's kernel, "explicit" two matrix products, "auto" the faster one.
            All give the same output. With a mask there are two products.

    Raises:
        ValueError: The number of heads doesn't divide the width, or the backend is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        qk_norm: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads {num_heads} does not divide embed_dim {embed_dim}")
        check_choice(backend, get_args(Backend), name="attention backend")
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.backend: Backend = backend
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.q_norm = build_norm(self.head_dim, enabled=qk_norm)
        self.k_norm = build_norm(self.head_dim, enabled=qk_norm)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias)

    def forward(
        self,
        query: Queries,
        key: Keys = None,
        value: Keys = None,
        mask: Mask = None,
        *,
        causal: bool = False,
    ) -> Float[Tensor, "B Nq D"]:
        """Return the output alone. For `mask` and `causal` see `scaled_dot_product_attention`; the
        weights are [B, H, Nq, Nk]."""
        q, k, v = self._project(query, key, value)
        backend = self.backend
        if backend == "auto":
            needs_gradient = torch.is_grad_enabled() and v.requires_grad
            backend = choose_backend(v.device.type, v.dtype, v.shape[-2], needs_gradient)
        # Fused kernels disagree on rows without keys, so a mask needs the products.
        if backend == "fused" and mask is None and not causal:
            return self._merge_heads(attend_fused(q, k, v))
        return self._merge_heads(scaled_dot_product_attention(q, k, v, mask, causal=causal)[0])

    def forward_with_weights(
        self,
        query: Queries,
        key: Keys = None,
        value: Keys = None,
        mask: Mask = None,
        *,
        causal: bool = False,
    ) -> tuple[Float[Tensor, "B Nq D"], Float[Tensor, "B H Nq Nk"]]:
        """Return the output and the weights of every head. See `forward`."""
        q, k, v = self._project(query, key, value)
        context, weights = scaled_dot_product_attention(q, k, v, mask, causal=causal)
        return self._merge_heads(context), weights

    def _project(self, query: Queries, key: Keys, value: Keys) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value of every head: [B, H, N, K] each."""
        heads = (self.num_heads, self.head_dim)
        if key is None and value is None:
            # Self-attention needs one product for all three.
            packed = self.qkv(query).reshape(*query.shape[:2], 3, *heads)  # [B, N, 3, H, K]
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            # torch's fused kernel doesn't check that each key has one value.
            if key is None or value is None or key.shape[:2] != value.shape[:2]:
                raise ValueError("cross-attention needs keys, and as many values")
            # Each third of the packed projection is applied to its own tokens.
            biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
            thirds = zip((query, key, value), self.qkv.weight.chunk(3), biases, strict=True)
            q, k, v = (
                F.linear(tokens, weight, bias).reshape(*tokens.shape[:2], *heads).transpose(1, 2)
                for tokens, weight, bias in thirds
            )
        return self.q_norm(q), self.k_norm(k), v

    def _merge_heads(self, context: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N D"]:
        output: Tensor = self.proj(context.transpose(1, 2).flatten(2))  # heads side by side
        return output


def choose_backend(
    device_type: str, dtype: torch.dtype, num_tokens: int, needs_gradient: bool
) -> Backend:
    """Choose the faster backend. It is the fused one except for bfloat16 on a CPU, where its
    backward pass takes two to five times as long, and without AMX inference is slower, too."""
    if device_type != "cpu" or dtype != torch.bfloat16 or num_tokens > MAX_EXPLICIT_TOKENS:
        return "fused"
    return "explicit" if needs_gradient or not _has_amx() else "fused"


# A constant for the compiler: reading processor flags would break its graph.
@constant_when_compiled
def _has_amx() -> bool:
    return "amx_bf16" in cpu_flags()


def attend_fused(
    query: Float[Tensor, "B H Nq K"],
    key: Float[Tensor, "B H Nk K"],
    value: Float[Tensor, "B H Nk K"],
) -> Float[Tensor, "B H Nq K"]:
    """Compute the formula by torch's kernel, which never stores the weights. Centred keys rule out
    a backward pass of NaN; see `_can_use_cudnn`."""
    if _can_use_cudnn(key):
        key = centre_keys(key)
    return F.scaled_dot_product_attention(query, key, value)


def _can_use_cudnn(key: Tensor) -> bool:
    """Return whether torch may choose cuDNN's kernel, which takes half precision on a GPU. Autocast
    converts to it inside the operation.

    On an H100 or H200 its backward pass computes exp(0 − l) for keys beyond the last one, with l
    the logarithm of the sum of a row's exponentials. For 64, 192, 320, … keys that is infinite if
    l < −88.7, and the gradient NaN (https://github.com/NVIDIA/cudnn-frontend/pull/628).
    """
    is_half = key.dtype in (torch.bfloat16, torch.float16)
    return key.is_cuda and (is_half or torch.is_autocast_enabled("cuda"))


def centre_keys(key: Float[Tensor, "... Nk K"]) -> Float[Tensor, "... Nk K"]:
    """Subtract the mean key from every key, which leaves softmax(Q Kᵀ / √d_k) as it is.

    All scores of a row change by the same number, −q·k̄ / √d_k, and their mean becomes 0. The
    exponential function is convex, so by Jensen's inequality the mean of a row's n exponentials is
    at least exp(0), and the logarithm of their sum at least log n > 0, whatever q is. Rounding keys
    to bfloat16 moves the mean score by less than 2⁻⁸ of the mean magnitude of the products.
    """
    mean = key.mean(dim=-2, keepdim=True, dtype=torch.promote_types(key.dtype, torch.float32))
    return (key - mean).to(key.dtype)
