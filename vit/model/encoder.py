"""The encoder block: pre-norm attention and MLP, each added to the tokens it read."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vit.model.attention import NORM_EPS, Backend, MultiHeadAttention
from vit.runtime.arguments import check_choice
from vit.runtime.threads import thread_generator

Tokens = Float[Tensor, "B N D"]


class Mlp(nn.Module):
    """Two linear maps around an activation, for each token independently: "gelu" (exact), "relu2" = max(x, 0)² (So et
    al. 2021) or "swiglu" = silu(a)·b (Shazeer 2020), where `hidden_dim` counts a and b, as timm's packed SwiGLU."""

    def __init__(self, embed_dim: int, hidden_dim: int, *, activation: str = "gelu") -> None:
        super().__init__()
        check_choice(activation, ("gelu", "relu2", "swiglu"), name="mlp")
        if activation == "swiglu" and hidden_dim % 2:
            raise ValueError(f"swiglu halves its hidden width, which is odd: {hidden_dim}; change mlp_ratio")
        self.activation = activation
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim // 2 if activation == "swiglu" else hidden_dim, embed_dim)

    def forward(self, tokens: Tokens) -> Tokens:
        hidden = self.fc1(tokens)
        if self.activation == "swiglu":
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        elif self.activation == "gelu":
            hidden = F.gelu(hidden)
        else:
            hidden = _SquaredReLUFunction.apply(hidden) if self.training else F.relu(hidden).square()
        return cast(Tensor, self.fc2(hidden))


class _SquaredReLUFunction(torch.autograd.Function):
    """max(x, 0)² with a backward pass that reads and writes its tensors once, where autograd's does three times."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        positive = hidden.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return torch.addcmul(gradient.new_zeros(()), gradient, positive, value=2)


def drop_patches(tokens: Tokens, rate: float, *, num_prefix_tokens: int) -> Float[Tensor, "B M D"]:
    """PatchDropout (Liu et al. 2022, arXiv 2208.07220): a random subset of each image's patches, in random order, after
    the prefix tokens. Every image keeps as many, at least one. They have their positions already."""
    prefix, patches = tokens[:, :num_prefix_tokens], tokens[:, num_prefix_tokens:]
    count = max(round(patches.shape[1] * (1 - rate)), 1)
    drawn = torch.empty(patches.shape[:2], device=patches.device).uniform_(generator=thread_generator())
    kept = drawn.argsort(dim=1)[:, :count, None]
    return torch.cat([prefix, patches.gather(1, kept.expand(-1, -1, patches.shape[2]))], dim=1)


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch (Touvron et al. 2021, CaiT)."""

    def __init__(self, embed_dim: int, init_values: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((embed_dim,), init_values))

    def forward(self, tokens: Tokens) -> Tokens:
        return tokens * self.gamma


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): drops a residual branch for a random fraction of the samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path_rate {rate} is not a fraction from 0 to below 1")
        self.rate = rate

    def forward(self, branch: Tokens) -> Tokens:
        if not self.training or self.rate == 0:
            return branch
        keep = branch.new_empty(branch.shape[0], 1, 1).bernoulli_(1 - self.rate, generator=thread_generator())
        return branch * keep / (1 - self.rate)


class Block(nn.Module):
    """tokens + attention(norm(tokens)), then tokens + mlp(norm(tokens))."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        mlp: str = "gelu",
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        drop_path: float = 0.0,
        attention_backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self.attn = MultiHeadAttention(
            embed_dim, num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm, backend=attention_backend
        )
        self.ls1 = nn.Identity() if init_values is None else LayerScale(embed_dim, init_values)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(embed_dim, eps=NORM_EPS)
        self.mlp = Mlp(embed_dim, round(embed_dim * mlp_ratio), activation=mlp)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(embed_dim, init_values)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tokens, *, read: int | None = None) -> Float[Tensor, "B M D"]:
        """With `read` only that many leading tokens go on, M of them, having attended to all; otherwise M = N."""
        normed = self.norm1(tokens)
        if read is None:
            return self._add(tokens, self.attn(normed))
        return self._add(tokens[:, :read], self.attn(normed[:, :read], normed, normed))

    def forward_with_weights(self, tokens: Tokens) -> tuple[Tokens, Float[Tensor, "B H N N"]]:
        """The tokens and the attention weights, computed explicitly."""
        attended, weights = self.attn.forward_with_weights(self.norm1(tokens))
        return self._add(tokens, attended), weights

    def _add(self, tokens: Tensor, attended: Tensor) -> Tensor:
        tokens = tokens + self.drop_path1(self.ls1(attended))
        return cast(Tensor, tokens + self.drop_path2(self.ls2(self.mlp(self.norm2(tokens)))))
