"""The encoder block: pre-norm attention and MLP, each added to the tokens it read."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.attention import Backend, MultiHeadAttention, build_norm
from vit.runtime.arguments import check_choice
from vit.runtime.tensors import Tokens
from vit.runtime.threads import thread_generator


class Block(nn.Module):
    """tokens + attention(norm(tokens)), then tokens + mlp(norm(tokens)).

    Args:
        embed_dim, num_heads, qkv_bias, qk_norm: See `MultiHeadAttention`.
        mlp_ratio: Width of the MLP's hidden layer in units of embed_dim.
        mlp: Activation of the MLP; see `Mlp`.
        init_values: LayerScale's initial value; None: no LayerScale.
        drop_path: Rate at which a branch is dropped from a sample.
        attention_backend: See `MultiHeadAttention`.
    """

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
        # An Identity replaces a part that is off. It has no parameters, so names stay timm's.
        self.norm1 = build_norm(embed_dim)
        self.attn = MultiHeadAttention(
            embed_dim,
            num_heads,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            backend=attention_backend,
        )
        self.ls1 = _build_scale(embed_dim, init_values)
        self.drop_path1 = _build_drop(drop_path)
        self.norm2 = build_norm(embed_dim)
        self.mlp = Mlp(embed_dim, round(embed_dim * mlp_ratio), activation=mlp)
        self.ls2 = _build_scale(embed_dim, init_values)
        self.drop_path2 = _build_drop(drop_path)

    def forward(
        self, tokens: Tokens, *, num_out_tokens: int | None = None
    ) -> Float[Tensor, "B M D"]:
        """Return the tokens after the block.

        Args:
            tokens: [B, N, D].
            num_out_tokens: Number M of leading tokens to return; they attend to all tokens. None
                returns all.
        """
        normed = self.norm1(tokens)
        if num_out_tokens is None:
            return self._add_branches(tokens, self.attn(normed))
        # Queries come from the leading tokens, keys and values from all.
        attended = self.attn(normed[:, :num_out_tokens], normed, normed)
        return self._add_branches(tokens[:, :num_out_tokens], attended)

    def forward_with_weights(self, tokens: Tokens) -> tuple[Tokens, Float[Tensor, "B H N N"]]:
        """Return the tokens and the attention weights, computed explicitly."""
        attended, weights = self.attn.forward_with_weights(self.norm1(tokens))
        return self._add_branches(tokens, attended), weights

    def _add_branches(self, tokens: Tensor, attended: Tensor) -> Tensor:
        tokens = tokens + self.drop_path1(self.ls1(attended))
        branch: Tensor = self.drop_path2(self.ls2(self.mlp(self.norm2(tokens))))
        return tokens + branch


class Mlp(nn.Module):
    """Two linear maps around an activation, for each token independently.

    Args:
        embed_dim: Width of the tokens.
        hidden_dim: Width between the maps; "swiglu" counts both its halves, as timm's packed one.
        activation: "gelu" (exact), "relu2" = max(x, 0)² (So et al. 2021) or "swiglu" = silu(a)·b
            (Shazeer 2020).

    Raises:
        ValueError: The activation is unknown, or the width of "swiglu" is odd.
    """

    def __init__(self, embed_dim: int, hidden_dim: int, *, activation: str = "gelu") -> None:
        super().__init__()
        check_choice(activation, ("gelu", "relu2", "swiglu"), name="mlp")
        if activation == "swiglu" and hidden_dim % 2:
            raise ValueError(
                f"swiglu halves its hidden width, which is odd: {hidden_dim}; change mlp_ratio"
            )
        self.activation = activation
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim // 2 if activation == "swiglu" else hidden_dim, embed_dim)

    def forward(self, tokens: Tokens) -> Tokens:
        hidden = self.fc1(tokens)
        if self.activation == "swiglu":
            # One map computes both halves. The gate comes first, as in timm.
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * hidden
        elif self.activation == "gelu":
            hidden = F.gelu(hidden)
        else:
            hidden = F.relu(hidden).square()
        output: Tensor = self.fc2(hidden)
        return output


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch (Touvron et al. 2021, CaiT)."""

    def __init__(self, embed_dim: int, init_values: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((embed_dim,), init_values))

    def forward(self, tokens: Tokens) -> Tokens:
        return tokens * self.gamma


def _build_scale(embed_dim: int, init_values: float | None) -> nn.Module:
    return nn.Identity() if init_values is None else LayerScale(embed_dim, init_values)


def _build_drop(rate: float) -> nn.Module:
    return DropPath(rate) if rate else nn.Identity()


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): drops a residual branch from a random fraction of the
    samples."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path_rate {rate} is not a fraction from 0 to below 1")
        self.rate = rate

    def forward(self, branch: Tokens) -> Tokens:
        if not self.training:
            return branch
        mask = branch.new_empty(branch.shape[0], 1, 1)
        mask.bernoulli_(1 - self.rate, generator=thread_generator())
        # Branches that stay are scaled up, so that the expected value doesn't change.
        return branch * mask / (1 - self.rate)


def drop_patches(tokens: Tokens, rate: float, *, num_prefix_tokens: int) -> Float[Tensor, "B M D"]:
    """PatchDropout (Liu et al. 2022, arXiv 2208.07220): a random subset of each image's patches, in
    random order, after the prefix tokens. Positions are added before.

    Args:
        tokens: [B, N, D], prefix tokens first.
        rate: Fraction of patches to drop, from 0 to 1. Every image loses the same number, and at
            least one patch stays.
        num_prefix_tokens: Number of leading tokens that always stay.
    """
    prefix = tokens[:, :num_prefix_tokens]
    patches = tokens[:, num_prefix_tokens:]
    count = max(round(patches.shape[1] * (1 - rate)), 1)
    # Sorting random numbers gives a random permutation of each image's patches.
    noise = torch.empty(patches.shape[:2], device=patches.device)
    noise.uniform_(generator=thread_generator())
    chosen = noise.argsort(dim=1)[:, :count, None]  # [B, count, 1]
    return torch.cat([prefix, patches.gather(1, chosen.expand(-1, -1, patches.shape[2]))], dim=1)
