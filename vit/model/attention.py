"""Attention: the formula, its masks, and the multi-head layer that every encoder block uses.

    Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V            (Vaswani et al. 2017, equation 1)

Masks: True (or 1) is attended to, False (or 0) ignored. A query whose keys are all ignored gets
zero weights and a zero output, not NaN and not a uniform average.
"""

from contextlib import nullcontext
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit.runtime.arguments import check_choice
from vit.runtime.device import cpu_flags
from vit.runtime.threads import constant_when_compiled

Backend = Literal["auto", "fused", "explicit"]
# Boolean, or integers 0 and 1. Other masks raise a ValueError.
Mask = Shaped[Tensor, "..."] | None
Queries = Float[Tensor, "B Nq D"]
Keys = Float[Tensor, "B Nk D"] | None

# Vision transformers use this epsilon in every LayerNorm; torch's own default is 1e-5.
NORM_EPS = 1e-6
# Beyond a few hundred tokens, explicit weights exceed a processor's caches.
MAX_EXPLICIT_TOKENS = 640
# torch's kernels besides cuDNN's.
_OTHER_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def scaled_dot_product_attention(
    query: Float[Tensor, "... Nq K"],
    key: Float[Tensor, "... Nk K"],
    value: Float[Tensor, "... Nk V"],
    mask: Mask = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "... Nq V"], Float[Tensor, "... Nq Nk"]]:
    """The formula itself (Vaswani et al. 2017, equation 1).

    Args:
        query, key: [..., N, K], with any leading axes.
        value: [..., Nk, V].
        mask, causal: See `compute_weights`.

    Returns:
        The output, and the weights that made it.
    """
    weights = compute_weights(query, key, mask, causal=causal)
    return weights @ value, weights


def compute_weights(
    query: Float[Tensor, "... Nq K"],
    key: Float[Tensor, "... Nk K"],
    mask: Mask = None,
    *,
    causal: bool = False,
) -> Float[Tensor, "... Nq Nk"]:
    """softmax(Q Kᵀ / √d_k).

    A dot product of d_k entries of unit variance has variance d_k; dividing by √d_k keeps the
    softmax from saturating (Vaswani et al. 2017, footnote 4).

    Args:
        query, key: [..., N, K], with any leading axes.
        mask: Boolean or 0/1 integers, True = attend, of any shape that broadcasts to the weights.
            None: every query attends to every key.
        causal: Query i attends to keys 0…i, counted from the upper left corner when the lengths
            differ, as in torch. Combines with `mask`.

    Returns:
        The weights: each row is a distribution over the keys, or zeros where all are ignored.

    Raises:
        ValueError: The mask is floating point, holds other integers, or doesn't broadcast.
    """
    scores: Tensor = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)  # [..., Nq, Nk]
    allowed = _allowed_keys(mask, shape=scores.shape, causal=causal, device=scores.device)
    if allowed is None:
        return scores.softmax(dim=-1)
    # The lowest finite number instead of -inf: a row without any key then stays finite, and so
    # does its gradient, until the second line sets it to zero.
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~allowed, 0.0)


def mask_from_key_padding(padding: Shaped[Tensor, "B Nk"]) -> Bool[Tensor, "B 1 1 Nk"]:
    """Convert torch's `key_padding_mask`, where True means ignore, to a mask of ours."""
    if padding.dtype != torch.bool:
        raise ValueError(
            f"a key padding mask is boolean (True = ignored), not {padding.dtype}; "
            "use padding.bool()"
        )
    return ~padding[:, None, None, :]


def build_norm(width: int, *, enabled: bool = True) -> nn.Module:
    """Build a LayerNorm with the usual epsilon, or an Identity if it is not enabled."""
    return nn.LayerNorm(width, eps=NORM_EPS) if enabled else nn.Identity()


class MultiHeadAttention(nn.Module):
    """Heads attend in parallel, each in its slice of the width; their outputs are concatenated,
    then projected (Vaswani et al. 2017, section 3.2.2).

    Self-attention when called with `query` alone, cross-attention when `key` and `value` are given.
    The projections of query, key and value are the three thirds of `qkv`, which is timm's layout
    and torch's `in_proj_weight`.

    Args:
        embed_dim: Width of the tokens, D.
        num_heads: Number of heads, H, which divides the width.
        qkv_bias, proj_bias: Give the projections biases.
        qk_norm: LayerNorm of each head's queries and keys (Dehghani et al. 2023).
        backend: "fused" is torch's kernel, "explicit" two matrix products, "auto" the faster one.

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
            divisors = [heads for heads in range(1, embed_dim + 1) if embed_dim % heads == 0]
            nearest = sorted(sorted(divisors, key=lambda heads: abs(heads - num_heads))[:2])
            raise ValueError(
                f"num_heads {num_heads} does not divide embed_dim {embed_dim}; "
                f"try {' or '.join(map(str, nearest))}"
            )
        check_choice(backend, get_args(Backend), name="attention backend")
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = self.head_dim**-0.5
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
        """Return the output alone, by the faster backend.

        See `compute_weights` for `mask` and `causal`; the weights are [B, H, Nq, Nk].
        """
        q, k, v = self._project(query, key, value)  # [B, H, N, K] each
        # Both backends give the same output. Which is faster depends on the device, the precision
        # and the number of tokens.
        backend = self.backend
        if backend == "auto":
            needs_gradient = torch.is_grad_enabled() and v.requires_grad
            backend = choose_backend(v.device.type, v.dtype, v.shape[-2], needs_gradient)
        if backend == "fused":
            return self._merge_heads(_attend_fused(q, k, v, mask, causal=causal))
        return self._merge_heads(compute_weights(q, k, mask, causal=causal) @ v)

    def forward_with_weights(
        self,
        query: Queries,
        key: Keys = None,
        value: Keys = None,
        mask: Mask = None,
        *,
        causal: bool = False,
    ) -> tuple[Float[Tensor, "B Nq D"], Float[Tensor, "B H Nq Nk"]]:
        """Return the output and the weights of every head. Their rows sum to one."""
        q, k, v = self._project(query, key, value)
        context, weights = scaled_dot_product_attention(q, k, v, mask, causal=causal)
        return self._merge_heads(context), weights

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """Convert torch's layer, with its weights.

        Inputs and outputs are always batch first here.

        Raises:
            ValueError: The layer has kdim, vdim, add_bias_kv, add_zero_attn or dropout.
        """
        has_other_keys = module.bias_k is not None or module.add_zero_attn
        if module.in_proj_weight is None or has_other_keys or module.dropout:
            raise ValueError(
                "only kdim = vdim = embed_dim, neither add_bias_kv nor add_zero_attn nor dropout, "
                "converts"
            )
        has_bias = module.in_proj_bias is not None
        layer = cls(module.embed_dim, module.num_heads, qkv_bias=has_bias, proj_bias=has_bias)
        weights = {
            name.replace("in_proj_", "qkv.").replace("out_proj", "proj"): tensor
            for name, tensor in module.state_dict().items()
        }
        # The layer moves to the device and the precision of torch's layer first.
        layer.to(module.in_proj_weight).load_state_dict(weights)
        return layer.train(module.training)

    def _project(self, query: Queries, key: Keys, value: Keys) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value of every head: [B, H, N, K] each.

        Raises:
            ValueError: The shapes don't fit each other or the layer.
        """
        heads = (self.num_heads, self.head_dim)
        if key is None and value is None:
            self._check_tokens(query)
            # Self-attention needs one product for all three.
            packed = self.qkv(query).reshape(*query.shape[:2], 3, *heads)  # [B, N, 3, H, K]
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        elif key is None or value is None:
            raise ValueError("cross-attention needs both key and value; self-attention neither")
        else:
            self._check_tokens(query, key, value)
            # Cross-attention applies each third of the packed projection to its own tokens.
            biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
            thirds = zip((query, key, value), self.qkv.weight.chunk(3), biases, strict=True)
            q, k, v = (
                F.linear(tokens, weight, bias).reshape(*tokens.shape[:2], *heads).transpose(1, 2)
                for tokens, weight, bias in thirds
            )
        return self.q_norm(q), self.k_norm(k), v

    def _check_tokens(self, query: Tensor, *others: Tensor) -> None:
        """Raise ValueError unless both backends attend from `query` to keys and values, `others`."""
        width = self.num_heads * self.head_dim
        for tokens in (query, *others):
            if tokens.ndim != 3 or tokens.shape[-1] != width:
                raise ValueError(
                    f"tokens are [batch, tokens, {width}], not {list(tokens.shape)}; a sequence "
                    "without a batch is tokens[None]"
                )
            if tokens.shape[0] != query.shape[0]:
                raise ValueError(
                    f"a batch of {query.shape[0]} queries and one of {tokens.shape[0]} keys or "
                    "values have no attention; expand the smaller one"
                )
        if others and others[0].shape[1] != others[1].shape[1]:
            lengths = " and ".join(f"{tokens.shape[1]}" for tokens in others)
            raise ValueError(f"each key has one value, but there are {lengths}; cut the longer one")

    def _merge_heads(self, context: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N D"]:
        output: Tensor = self.proj(context.transpose(1, 2).flatten(2))  # heads side by side
        return output


def choose_backend(
    device_type: str, dtype: torch.dtype, num_tokens: int, needs_gradient: bool
) -> Backend:
    """Choose the faster of torch's fused kernel and two explicit products.

    The fused kernel is faster except for bfloat16 on a CPU. There its backward pass takes two to
    five times as long, and without AMX inference is slower too.
    """
    if device_type != "cpu" or dtype != torch.bfloat16 or num_tokens > MAX_EXPLICIT_TOKENS:
        return "fused"
    return "explicit" if needs_gradient or not _has_amx() else "fused"


# A constant for the compiler: reading processor flags would break its graph.
@constant_when_compiled
def _has_amx() -> bool:
    return "amx_bf16" in cpu_flags()


def _attend_fused(
    query: Float[Tensor, "B H Nq K"],
    key: Float[Tensor, "B H Nk K"],
    value: Float[Tensor, "B H Nk K"],
    mask: Mask,
    *,
    causal: bool,
) -> Float[Tensor, "B H Nq K"]:
    """Compute the formula by torch's kernel, which never stores the weights.

    The backward pass of cuDNN's kernel, which torch may choose, is NaN on some GPUs where a row's
    scores are all far below 0. Centred keys rule that out. With a mask they don't, and cuDNN is not
    used. See `_can_use_cudnn`.
    """
    if mask is None:
        if not causal and _can_use_cudnn(key):
            key = centre_keys(key)
        # Without a mask, torch can choose a faster kernel that supports none.
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    allowed = _allowed_keys(mask, shape=shape, causal=causal, device=query.device)
    assert allowed is not None
    # Fused kernels disagree on rows without keys: such a row attends to all keys here, and its
    # result is set to zero.
    is_empty = ~allowed.any(dim=-1, keepdim=True)
    with sdpa_kernel(_OTHER_KERNELS) if _can_use_cudnn(key) else nullcontext():
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed | is_empty)
    return context.masked_fill(is_empty, 0.0)


def _can_use_cudnn(key: Tensor) -> bool:
    """Return whether torch may choose cuDNN's kernel, which takes half precision on a GPU. Autocast
    converts to it inside the operation.

    On an H100 or H200 its backward pass computes exp(0 − l) for keys beyond the last one, with l
    the logarithm of the sum of a row's exponentials. For 64, 192, 320, … keys that is infinite if
    l < −88.7, and the gradient of the queries NaN (https://github.com/NVIDIA/cudnn-frontend/pull/628;
    with a mask: https://github.com/pytorch/pytorch/issues/196678; for one query and 128 keys, those
    of keys and values: https://github.com/NVIDIA/cudnn-frontend/issues/1072).
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


def _allowed_keys(
    mask: Mask,
    *,
    shape: torch.Size,
    causal: bool,
    device: torch.device,
) -> Bool[Tensor, "..."] | None:
    """Where weights of this shape may be non-zero, broadcasting to it; None: everywhere."""
    allowed = None
    if mask is not None:
        _check_mask(mask, shape)
        # the fused kernel takes no mask with fewer axes than the matrix of weights
        allowed = mask.bool().expand(*(1,) * (2 - mask.ndim), *mask.shape)
    if causal:
        triangle = torch.ones(shape[-2:], dtype=torch.bool, device=device).tril()
        allowed = triangle if allowed is None else allowed & triangle
    return allowed


def _check_mask(mask: Shaped[Tensor, "..."], shape: torch.Size) -> None:
    if mask.is_floating_point():
        raise ValueError(
            f"an attention mask is boolean, True = attend, not {mask.dtype}; "
            "of one that adds -inf to what it ignores, pass (mask == 0)"
        )
    # values can't be read while the compiler traces
    is_checkable = mask.dtype != torch.bool and not torch.compiler.is_compiling()
    if is_checkable and ((mask != 0) & (mask != 1)).any():
        raise ValueError(
            "an integer attention mask holds 0 and 1, "
            f"this one goes from {mask.min()} to {mask.max()}"
        )
    # a mask with more axes or longer sides would enlarge the weights
    sides = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > len(shape) or any(side not in (1, expected) for side, expected in sides):
        raise ValueError(
            f"mask {list(mask.shape)} does not broadcast to the attention weights {list(shape)}"
        )
