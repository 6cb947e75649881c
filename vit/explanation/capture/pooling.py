"""Which tokens a model's class decision is made from: the readout vector u, how much each token that leaves the encoder
counts in the pooled feature. Reading mean-pooled models at the class token (or at token 0 where there is none) is a
common mistake.

timm and this project say how they pool. Of other models it is measured: for a random mixture f of the logits and the
tokens x after the last norm, u_j is the mean over the channels d of |∂f/∂x_jd| / Σ_k |∂f/∂x_kd|. Where the pooled
feature is a weighted mean of tokens (class token, mean, both, maximum), this is the weight, whatever classifies it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from vit.explanation.capture.layers import at_least_float32, first_output

# of this project and timm, whose `global_pool` says which tokens are read
_TELL_POOLING = ("VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit")


def tells_pooling(model: nn.Module) -> bool:
    """Whether the model's own attributes say how it pools. Derived classes and wrappers may do anything."""
    library = type(model).__module__.partition(".")[0]
    return library in ("vit", "timm") and type(model).__name__ in _TELL_POOLING


class LastTokens:
    """The tokens [B, N, D] that leave the last block and each module after it, in the graph of the logits."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.features: Tensor | None = None  # what the last linear layer took

    def measure_readout(self, logits: Float[Tensor, "B C"]) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N D"]]:
        """How much each token counts, and the tokens that are pooled. Raises ValueError where the logits don't depend
        on the tokens, or where tokens are mixed after the last block."""
        gradients = self._differentiate(logits)
        if self.features is not None and not any(g is not None and g.any() for g in gradients):
            gradients = self._differentiate(self.features)  # of a classifier that is still all zeros
        used = [place for place, gradient in enumerate(gradients) if gradient is not None and gradient.any()]
        if not used or gradients[0] is None:
            raise ValueError("the logits don't depend on the tokens of the last attention layer, so none can be read")
        before, after, gradient = self.tokens[0], self.tokens[used[-1]], gradients[used[-1]]
        assert gradient is not None
        if after is not before:  # nothing but each token's own norm lies between, and all goes through it
            alternate = (torch.arange(after.shape[1], device=after.device) % 2 == 0)[:, None]
            (through,) = torch.autograd.grad(after, before, gradient * alternate, retain_graph=True)
            error = (through - gradients[0] * alternate).abs().max()
            if error > 1e-2 * gradients[0].abs().max():
                raise ValueError("tokens are mixed after the last attention layer that is known, so no map is exact")
        weight = at_least_float32(gradient.abs())
        total = weight.sum(dim=1, keepdim=True)
        share = torch.where(total > 0, weight / total.clamp_min(torch.finfo(weight.dtype).tiny), 0.0).sum(dim=2)
        return share / share.sum(dim=1, keepdim=True), after

    def _differentiate(self, outputs: Tensor) -> tuple[Tensor | None, ...]:
        signs = torch.randint(2, outputs.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
        score = (outputs * signs.to(outputs)).sum()
        return torch.autograd.grad(score, self.tokens, retain_graph=True, allow_unused=True)


@contextmanager
def capture_last_tokens(model: nn.Module, blocks: list[nn.Module]) -> Iterator[LastTokens]:
    """Keep what leaves the last of `blocks` and what follows. Without gradients the graph begins there."""
    last, inside = LastTokens(), {id(module) for block in blocks for module in block.modules()}

    def on_block(module: nn.Module, args: Any, result: Any) -> Any:
        tokens = first_output(result)
        if not tokens.requires_grad:
            torch.set_grad_enabled(True)  # until the caller's context ends
            tokens = tokens.detach().requires_grad_()
            result = (tokens, *result[1:]) if isinstance(result, tuple) else tokens
        last.tokens, last.features = [tokens], None
        return result

    def on_module(module: nn.Module, args: Any, result: Any) -> None:
        if last.tokens and isinstance(result, Tensor) and result.shape[:-1] == last.tokens[0].shape[:-1]:
            last.tokens.append(result)
        if last.tokens and isinstance(module, nn.Linear):
            last.features = args[0]

    handles = [blocks[-1].register_forward_hook(on_block)]
    handles += [module.register_forward_hook(on_module) for module in model.modules() if id(module) not in inside]
    try:
        yield last
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def compute_readout(
    model: Any, tokens: Float[Tensor, "B N D"], pooling: dict[str, Tensor], *, num_prefix_tokens: int
) -> Float[Tensor, "B N"]:
    """The readout of a model that `tells_pooling`; `tokens` are what it pools."""
    num_tokens, num_prefix, pool = tokens.shape[1], num_prefix_tokens, model.global_pool
    readout = torch.zeros(tokens.shape[:2], dtype=at_least_float32(tokens).dtype, device=tokens.device)
    first = 0 if getattr(model, "pool_include_prefix", False) else num_prefix
    if pool == "token":
        distilled = getattr(model, "head_dist", None) is not None
        readout[:, : 1 + distilled] = 1 / (1 + distilled)
    elif pool == "avg":
        readout[:, first:] = 1 / (num_tokens - first)
    elif pool in ("max", "avgmax"):
        winners = F.one_hot(tokens[:, first:].argmax(dim=1), num_tokens - first).float()  # [B, D, N]: of each channel
        maxima = winners.mean(dim=1)
        readout[:, first:] = maxima if pool == "max" else 0.5 / (num_tokens - first) + 0.5 * maxima
    elif pool == "attention":
        readout[:, num_prefix:] = model.compute_pool_weights(tokens)
    elif pool == "map" and pooling:
        query, key = pooling["q_norm"], pooling["k_norm"]
        attention = (query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)).softmax(dim=-1)  # [B, H, latents, N]
        readout[:, num_tokens - key.shape[-2] :] = attention.mean(dim=(1, 2))
    else:
        raise ValueError(f"unknown pooling {pool!r}; known: token, avg, max, avgmax, attention, map")
    return readout


@contextmanager
def capture_attention_pooling(model: Any) -> Iterator[dict[str, Tensor]]:
    """What attention pooling computes: q_norm, k_norm, kv and heads (its result before the projection) of timm's
    (`global_pool="map"`), and pooled, the pooled feature, of ours. Nothing for other models."""
    captured: dict[str, Tensor] = {}

    def keep_output(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        captured[name] = output

    def keep_input(name: str, module: nn.Module, args: Any) -> None:
        captured[name] = args[0]

    handles: list[RemovableHandle] = []
    pool: Any = getattr(model, "attn_pool", None)
    if hasattr(pool, "latent"):
        handles += [
            getattr(pool, name).register_forward_hook(partial(keep_output, name)) for name in ("q_norm", "k_norm", "kv")
        ]
        handles.append(pool.proj.register_forward_pre_hook(partial(keep_input, "heads")))
    elif getattr(model, "seq_pool", None) is not None:
        handles.append(model.fc_norm.register_forward_pre_hook(partial(keep_input, "pooled")))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
