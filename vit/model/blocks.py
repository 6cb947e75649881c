"""The encoder block: pre-norm attention and MLP, each added to the tokens it read."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vit.model.attention import MultiHeadAttention, build_norm
from vit.runtime.arguments import check_choice
from vit.runtime.tensors import Tokens
from vit.runtime.threads import thread_generator


class Block(nn.Module):
    """tokens + attention(norm(tokens)), then tokens + mlp(norm(tokens)), where `LayerScale` has
    `init_values`, and each branch is dropped from a sample at the rate `drop_path`."""

    def __init__(
        self,
        embed_dim: int,
        attn: MultiHeadAttention,
        mlp: "Mlp",
        *,
        init_values: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(embed_dim)
        self.attn = attn
        self.ls1 = LayerScale(embed_dim, init_values)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = build_norm(embed_dim)
        self.mlp = mlp
        self.ls2 = LayerScale(embed_dim, init_values)
        self.drop_path2 = DropPath(drop_path)

    def forward(
        self, tokens: Tokens, *, num_out_tokens: int | None = None
    ) -> Float[Tensor, "B M D"]:
        """Return the first M = `num_out_tokens` tokens after the block, which attend to all; or all
        tokens."""
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
        hidden_dim: Width between the maps.
        activation: "gelu" (exact) or "relu2" = max(x, 0)² (So et al. 2021).
    """

    def __init__(self, embed_dim: int, hidden_dim: int, *, activation: str = "gelu") -> None:
        super().__init__()
        check_choice(activation, ("gelu", "relu2"), name="mlp")
        self.activation = activation
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, embed_dim)

    def forward(self, tokens: Tokens) -> Tokens:
        hidden = self.fc1(tokens)
        if self.activation == "relu2":
            hidden = F.relu(hidden).square()
        else:
            hidden = F.gelu(hidden)
        output: Tensor = self.fc2(hidden)
        return output


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch (Touvron et al. 2021, CaiT), initially
    `init_values`. None: the branch stays as it is, and there is no parameter."""

    def __init__(self, embed_dim: int, init_values: float | None) -> None:
        super().__init__()
        self.gamma = None
        if init_values is not None:
            self.gamma = nn.Parameter(torch.full((embed_dim,), init_values))

    def forward(self, tokens: Tokens) -> Tokens:
        return tokens if self.gamma is None else tokens * self.gamma


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): drops a residual branch from a random fraction of the
    samples, `rate`."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tokens) -> Tokens:
        if not self.training or not self.rate:
            return branch
        mask = branch.new_empty(branch.shape[0], 1, 1)
        mask.bernoulli_(1 - self.rate, generator=thread_generator())
        # Branches that stay are scaled up, so that the expected value doesn't change.
        return branch * mask / (1 - self.rate)


def drop_patches(tokens: Tokens, rate: float, *, num_prefix_tokens: int) -> Float[Tensor, "B M D"]:
    """PatchDropout (Liu et al. 2022, arXiv 2208.07220): the prefix tokens, which always stay, then
    a random subset of each image's patches in random order. `rate` is the fraction to drop; at
    least one stays."""
    prefix = tokens[:, :num_prefix_tokens]
    patches = tokens[:, num_prefix_tokens:]
    count = max(round(patches.shape[1] * (1 - rate)), 1)
    # Sorting random numbers gives a random permutation of each image's patches.
    noise = torch.empty(patches.shape[:2], device=patches.device)
    noise.uniform_(generator=thread_generator())
    chosen = noise.argsort(dim=1)[:, :count, None]  # [B, count, 1]
    return torch.cat([prefix, patches.gather(1, chosen.expand(-1, -1, patches.shape[2]))], dim=1)
