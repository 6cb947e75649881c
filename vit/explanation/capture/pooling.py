"""Find the pool weights u of a model: how much each output token of the encoder counts in the
pooled feature, which the model classifies. Explaining mean-pooled models at the class token (or at
token 0 if there is none) is a common mistake.

Models of timm and of this project have their pooling as an attribute. For other models it is
measured: for a random mixture f of the logits and the tokens x after the last norm, u_j is the mean
over the channels d of |∂f/∂x_jd| / Σ_k |∂f/∂x_kd|. If the pooled feature is a weighted mean of
tokens (class token, mean, both, maximum), this is the weight for any classifier.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit.explanation.capture.reader import ModelReader
from vit.model.logits import at_least_float32
from vit.runtime.tensors import Tokens

TokenWeights = Float[Tensor, "B N"]
# classes of this project and timm whose `global_pool` names the tokens that are pooled
_KNOWN_POOLING = ("VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit")


def has_known_pooling(model: nn.Module) -> bool:
    """Return whether the model's own attributes give its pooling. Derived classes and wrappers may
    do anything."""
    # by name, because a wrapper or a class of another library may have the same attributes
    library = type(model).__module__.partition(".")[0]
    return library in ("vit", "timm") and type(model).__name__ in _KNOWN_POOLING


@torch.no_grad()
def compute_pool_weights(model: Any, tokens: Tokens, pooling: dict[str, Tensor]) -> TokenWeights:
    """Compute the pool weights of a model that `has_known_pooling`.

    Args:
        model: A model of this project or timm.
        tokens: Tokens that it pools, [B, N, D].
        pooling: Tensors that `capture_attention_pooling` captured in the pass.

    Returns:
        Weights [B, N] whose rows sum to one, in float32 or more.

    Raises:
        ValueError: The name of the pooling is unknown.
    """
    num_tokens = tokens.shape[1]
    weights = torch.zeros(
        tokens.shape[:2], dtype=at_least_float32(tokens).dtype, device=tokens.device
    )
    first = find_first_pooled(model)
    match model.global_pool:
        case "token":
            is_distilled = getattr(model, "head_dist", None) is not None
            weights[:, : 1 + is_distilled] = 1 / (1 + is_distilled)
        case "avg":
            weights[:, first:] = 1 / (num_tokens - first)
        case "max":
            # each channel takes its maximum from one token, [B, D, N]
            winners = F.one_hot(tokens[:, first:].argmax(dim=1), num_tokens - first).float()
            weights[:, first:] = winners.mean(dim=1)
        case "map":
            attention = compute_latent_attention(pooling["q_norm"], pooling["k_norm"])
            weights[:, num_tokens - attention.shape[-1] :] = attention.mean(dim=(1, 2))
        case unknown:
            raise ValueError(f"unknown pooling {unknown!r}")
    return weights


def find_first_pooled(model: Any) -> int:
    """Return the first token of a mean or maximum over the patches or over all tokens. Prompts
    between the model's own prefix tokens and the patches are pooled with the patches."""
    return 0 if getattr(model, "pool_include_prefix", False) else int(model.num_prefix_tokens)


def compute_latent_attention(
    query: Float[Tensor, "B H latents K"], key: Float[Tensor, "B H N K"]
) -> Float[Tensor, "B H latents N"]:
    """Compute the weight of each token in timm's attention pooling."""
    scores: Tensor = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)
    return scores.softmax(dim=-1)


@contextmanager
def capture_attention_pooling(model: Any) -> Iterator[dict[str, Tensor]]:
    """Capture q_norm, k_norm, kv and heads (the result before the projection) of timm's attention
    pooling (`global_pool="map"`). Other models have none of them."""
    captured: dict[str, Tensor] = {}

    def keep_output(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        captured[name] = output

    def keep_heads(module: nn.Module, args: Any) -> None:
        captured["heads"] = args[0]

    with ExitStack() as stack:
        attention_pool: Any = getattr(model, "attn_pool", None)
        if hasattr(attention_pool, "latent"):
            for name in ("q_norm", "k_norm", "kv"):
                submodule = getattr(attention_pool, name)
                stack.enter_context(submodule.register_forward_hook(partial(keep_output, name)))
            stack.enter_context(attention_pool.proj.register_forward_pre_hook(keep_heads))
        yield captured


def measure_pool_weights(
    last_tokens: list[Tokens], logits: Float[Tensor, "B C"]
) -> tuple[TokenWeights, Tokens]:
    """Measure how much each token counts, and find the tokens that are pooled.

    Args:
        last_tokens: Tokens from `capture_last_tokens`, in the graph of the logits.
        logits: Logits of the same pass.

    Raises:
        ValueError: The logits don't depend on the tokens, or tokens are mixed after the last block.
    """
    generator = torch.Generator().manual_seed(0)
    # a plain sum may be constant, if the weights of the classes cancel
    signs = torch.randint(2, logits.shape[1:], generator=generator) * 2 - 1
    score = (logits * signs.to(logits)).sum()
    gradients = torch.autograd.grad(score, last_tokens, retain_graph=True, allow_unused=True)
    before_gradient = gradients[0]
    if before_gradient is None or not before_gradient.any():
        raise ValueError(
            "the logits don't depend on the tokens of the last attention layer, so none can be read"
        )

    # the tokens that are pooled are the last ones on the way to the logits
    tokens, gradient = last_tokens[0], before_gradient
    for later_tokens, later_gradient in zip(last_tokens, gradients, strict=True):
        if later_gradient is not None and later_gradient.any():
            tokens, gradient = later_tokens, later_gradient

    # between the last block and the pooling there may be only a norm of each token, and all logits
    # must depend on its result: then the gradient of every second token stays separate
    if tokens is not last_tokens[0]:
        every_second = (torch.arange(tokens.shape[1], device=tokens.device) % 2 == 0)[:, None]
        (through,) = torch.autograd.grad(
            tokens, last_tokens[0], gradient * every_second, retain_graph=True
        )
        error = (through - before_gradient * every_second).abs().max()
        if error > 1e-2 * before_gradient.abs().max():
            raise ValueError(
                "tokens are mixed after the last attention layer that is known, so no map is exact"
            )

    # shares within each channel first, so that a channel with large gradients doesn't dominate
    magnitude = at_least_float32(gradient.abs())
    total = magnitude.sum(dim=1, keepdim=True)
    tiny = torch.finfo(magnitude.dtype).tiny
    shares = torch.where(total > 0, magnitude / total.clamp_min(tiny), 0.0).sum(dim=2)
    return shares / shares.sum(dim=1, keepdim=True), tokens


@contextmanager
def capture_last_tokens(reader: ModelReader) -> Iterator[list[Tokens]]:
    """Keep the tokens that leave the last block and those that leave each module after it. Without
    gradients the graph begins there."""
    last_tokens: list[Tensor] = []

    def on_last(tokens: Tensor) -> Tensor:
        if not tokens.requires_grad:
            torch.set_grad_enabled(True)  # until the caller's context ends
            tokens = tokens.detach().requires_grad_()
        last_tokens[:] = [tokens]
        return tokens

    order = reader.places[-1].order

    def on_module(module: nn.Module, args: Any, result: Any) -> Tensor | None:
        # modules before the last block don't matter, and a number for each token is a weight
        is_tokens = isinstance(result, Tensor) and result.ndim == 3 and result.shape[-1] > 1
        if not last_tokens or not is_tokens:
            return None
        shape = last_tokens[0].shape[:-1]
        if result.shape[:-1] == shape:
            last_tokens.append(result)
        elif order(result).shape[:-1] == shape:
            last_tokens.append(order(result))
            # the model goes on with the tensor that is kept
            return order(last_tokens[-1])
        return None

    # only what follows the last block can be the pooling
    inside_blocks = {id(module) for place in reader.places for module in place.block.modules()}
    with ExitStack() as stack:
        stack.enter_context(reader.change_last_tokens(on_last))
        for module in reader.model.modules():
            if id(module) not in inside_blocks:
                stack.callback(module.register_forward_hook(on_module).remove)
        yield last_tokens
