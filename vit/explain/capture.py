"""Read the attention of an unmodified vision transformer while its fused kernels stay on.

Fused attention never returns its weights, so hooks keep what enters it (queries and keys), and softmax(q kᵀ
· scale) is computed again when it is asked for. The forward pass itself is untouched: logits with and
without capture are bit-equal, and the hooks go whatever happens.

The gradient of a score f with respect to a layer's attention A follows from the heads' output O = A·V:
∂f/∂A = (∂f/∂O) Vᵀ, per head. One backward pass to the O's gives it for all layers, and no N×N tensor enters
the graph.

Each capture proves itself: where A·V of its first image is not what the layer computed (an unknown mask,
position bias, gate …), it raises instead of returning something plausible.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

_HIERARCHICAL = (
    "swin",
    "hiera",
    "mvit",
    "maxvit",
    "maxxvit",
    "pyramidvision",
    "twins",
    "davit",
    "focalnet",
    "levit",
)
_SUPPORTED = "this project's models, timm's VisionTransformer and Eva, torchvision's and Hugging Face's ViT"


class AttentionLayer:
    """One attention layer and what the last forward pass left of it. Subclasses read one family of modules
    each.

    This one reads modules with timm's names: `qkv`, `q_norm`, `k_norm`, `proj` (and `norm` before it).
    """

    def __init__(self, name: str, module: nn.Module, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.module: Any = module
        self.tokens: Tensor | None = None  # [B, N, D], what entered the attention module
        self.query: Tensor | None = None  # [B, H, N, K], as the module's own code made it
        self.key: Tensor | None = None
        self.heads: Tensor | None = None  # [B, N, H·K]: O, the heads' results side by side
        self.block_tokens: Tensor | None = None  # [B, N, D], what left the block
        self.options: dict[str, Any] = {}  # the other arguments of the module's forward
        self._proved = False

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        """Is `module`, a child of `block`, of this family?"""
        names = ("qkv", "q_norm", "k_norm", "proj", "num_heads", "scale")
        return not isinstance(block, nn.Sequential) and all(hasattr(module, name) for name in names)

    @property
    def num_heads(self) -> int:
        return int(self.module.num_heads)

    @property
    def scale(self) -> float:
        return float(self.module.scale)

    @property
    def num_tokens(self) -> int:
        assert self.tokens is not None
        return self.tokens.shape[1]

    def query_and_key(self) -> tuple[Tensor, Tensor]:
        """What attention multiplies, [B, H, N, K] each, before scaling."""
        assert self.query is not None
        assert self.key is not None
        return self.query, self.key

    def scaled_query_and_key(self) -> tuple[Float[Tensor, "B H N K"], Float[Tensor, "B H N K"]]:
        """Attention is softmax(query keyᵀ) of these; at least float32."""
        query, key = self.query_and_key()
        return _at_least_float32(query) * self.scale, _at_least_float32(key)

    def attention(self) -> Float[Tensor, "B H N N"]:
        """The weights after the softmax: rows are queries and sum to one."""
        query, key = self.scaled_query_and_key()
        return (query @ key.transpose(-2, -1)).softmax(dim=-1)

    def value(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N E"]:
        """The values, heads side by side."""
        query_bias, value_bias = self.module.qkv.bias, getattr(self.module, "v_bias", None)
        size = self.module.qkv.out_features // 3
        return F.linear(
            tokens, self.module.qkv.weight[-size:], value_bias if query_bias is None else query_bias[-size:]
        )

    def attention_gradient(self, heads_gradient: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N N"]:
        """∂f/∂A = (∂f/∂O) Vᵀ, per head."""
        assert self.tokens is not None
        value = self._split(self.value(self.tokens.detach()).detach())
        return _at_least_float32(self._split(heads_gradient)) @ _at_least_float32(value).transpose(-2, -1)

    def attach(self, *, gradients: bool) -> list[RemovableHandle]:
        """Hook the module. Every hook only reads; with `gradients` what it reads stays in the autograd
        graph."""

        def on_input(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self.tokens = args[0] if gradients else args[0].detach()
            self.heads = self.block_tokens = None
            self.options = options

        def on_block(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self.block_tokens = result[0] if isinstance(result, tuple) else result

        handles = [self.module.register_forward_pre_hook(on_input, with_kwargs=True)]
        handles += self._attach_query_and_key()
        handles.append(self._attach_heads(gradients))
        if gradients:
            handles.append(self.block.register_forward_hook(on_block))
        return handles

    def _attach_query_and_key(self) -> list[RemovableHandle]:
        def on_query(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.query = (
                output.detach().contiguous()
            )  # a copy: the view would keep the whole qkv output alive

        def on_key(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.key = output.detach().contiguous()

        return [
            self.module.q_norm.register_forward_hook(on_query),
            self.module.k_norm.register_forward_hook(on_key),
        ]

    def _attach_heads(self, gradients: bool) -> RemovableHandle:
        def on_heads(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._keep_heads(args[0], gradients)

        receiver = self.module.norm if hasattr(self.module, "norm") else self.module.proj
        return receiver.register_forward_pre_hook(on_heads)  # type: ignore[no-any-return]

    def _keep_heads(self, heads: Tensor, gradients: bool) -> None:
        self.heads = heads if gradients else heads[:0].detach()  # without gradients only the fact counts
        if not self._proved and not self.module.training:  # attention dropout would make them differ
            self._prove(heads)

    @torch.no_grad()
    def _prove(self, heads: Tensor) -> None:
        """Raise ValueError unless attention · value reproduces the first image's heads."""
        assert self.tokens is not None
        query, key = self.scaled_query_and_key()
        attention = (query[:1] @ key[:1].transpose(-2, -1)).softmax(dim=-1)
        expected = attention @ _at_least_float32(self._split(self.value(self.tokens[:1])))
        expected = self._project_heads(expected.transpose(1, 2).flatten(2))  # [1, N, H·K]
        actual = _at_least_float32(heads[:1])
        tolerance = 1e-3 if heads.dtype in (torch.float32, torch.float64) else 5e-2
        if expected.shape != actual.shape or (expected - actual).abs().max() > tolerance * actual.abs().max():
            raise ValueError(
                f"{self.name} ({type(self.module).__name__}) computes something else than softmax(q kᵀ)·v, "
                "perhaps with a mask or a position bias, so its attention cannot be recomputed; "
                f"known: {_SUPPORTED}"
            )
        self._proved = True

    def _project_heads(self, heads: Tensor) -> Tensor:
        """What `heads` keeps, from A·V."""
        return heads

    def _split(self, tensor: Tensor) -> Tensor:
        return torch.unflatten(tensor, -1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, N, K]


class RotaryLayer(AttentionLayer):
    """timm's Eva and rotary attention: patches' queries and keys are rotated after `q_norm` and `k_norm`."""

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        return type(module).__name__ in ("EvaAttention", "AttentionRope") and hasattr(module, "q_norm")

    def query_and_key(self) -> tuple[Tensor, Tensor]:
        query, key = super().query_and_key()
        rope = self.options.get("rope")
        return (query, key) if rope is None else (self._rotate(query, rope), self._rotate(key, rope))

    def value(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N E"]:
        if self.module.qkv is None:
            return self.module.v_proj(tokens)  # type: ignore[no-any-return]
        return super().value(tokens)

    def _rotate(self, tensor: Tensor, rope: Tensor) -> Tensor:
        """RoFormer (Su et al. 2021), eq. 34, on the patches; prefix tokens have no position."""
        prefix, patches = tensor.tensor_split([self.module.num_prefix_tokens], dim=2)
        sine, cosine = rope.to(tensor.dtype).chunk(2, dim=-1)
        if self.module.rotate_half:
            first, second = patches.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        else:
            turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
        return torch.cat([prefix, patches * cosine + turned * sine], dim=2)


class HuggingFaceLayer(AttentionLayer):
    """Hugging Face's ViT: separate `q_proj`, `k_proj`, `v_proj` and `o_proj`."""

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "num_attention_heads", "scaling")
        return all(hasattr(module, name) for name in names)

    @property
    def num_heads(self) -> int:
        return int(self.module.num_attention_heads)

    @property
    def scale(self) -> float:
        return float(self.module.scaling)

    def value(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N E"]:
        return self.module.v_proj(tokens)  # type: ignore[no-any-return]

    def _attach_query_and_key(self) -> list[RemovableHandle]:
        def on_query(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.query = self._split(output.detach())

        def on_key(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            self.key = self._split(output.detach())

        return [
            self.module.q_proj.register_forward_hook(on_query),
            self.module.k_proj.register_forward_hook(on_key),
        ]

    def _attach_heads(self, gradients: bool) -> RemovableHandle:
        def on_heads(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._keep_heads(args[0], gradients)

        return self.module.o_proj.register_forward_pre_hook(on_heads)  # type: ignore[no-any-return]


class TorchvisionLayer(AttentionLayer):
    """torchvision's ViT: `nn.MultiheadAttention`, whose projections are not modules that run.

    Queries and keys are projected again from its input. Its result is kept instead of O; the output
    projection is linear, so ∂f/∂O is ∂f/∂result · W.
    """

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and type(block).__name__ == "EncoderBlock"

    @property
    def scale(self) -> float:
        return float(self.module.head_dim**-0.5)

    def query_and_key(self) -> tuple[Tensor, Tensor]:
        assert self.tokens is not None
        with torch.no_grad():
            return self._split(self._project(self.tokens, 0)), self._split(self._project(self.tokens, 1))

    def value(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N E"]:
        return self._project(tokens, 2)

    def attention_gradient(self, heads_gradient: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N N"]:
        return super().attention_gradient(heads_gradient @ self.module.out_proj.weight.detach())

    def _attach_query_and_key(self) -> list[RemovableHandle]:
        return []

    def _attach_heads(self, gradients: bool) -> RemovableHandle:
        def on_result(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self._keep_heads(result[0], gradients)

        return self.module.register_forward_hook(on_result)  # type: ignore[no-any-return]

    def _project_heads(self, heads: Tensor) -> Tensor:
        return F.linear(
            heads, self.module.out_proj.weight.to(heads.dtype), self.module.out_proj.bias.to(heads.dtype)
        )

    def _project(self, tokens: Tensor, which: int) -> Tensor:
        rows = slice(which * self.module.embed_dim, (which + 1) * self.module.embed_dim)
        bias = self.module.in_proj_bias
        return F.linear(tokens, self.module.in_proj_weight[rows], None if bias is None else bias[rows])


LAYER_KINDS = (RotaryLayer, AttentionLayer, HuggingFaceLayer, TorchvisionLayer)


class AttentionRecord:
    """What `capture_attention` leaves of the last forward pass, first layer first."""

    def __init__(self, layers: list[AttentionLayer]) -> None:
        self._layers = layers

    @property
    def layers(self) -> list[AttentionLayer]:
        """The captured layers. Raises RuntimeError when the last forward pass did not go through all of
        them."""
        missing = [layer.name for layer in self._layers if layer.heads is None]
        if len(missing) == len(self._layers):
            raise RuntimeError(
                "no attention was captured: run the model inside `with capture_attention(model)`"
            )
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(self._layers)} attention layers were not captured: the forward pass "
                f"bypassed {', '.join(missing)}"
            )
        return self._layers

    @property
    def attentions(self) -> list[Float[Tensor, "B H N N"]]:
        """Each layer's weights after the softmax."""
        return [layer.attention() for layer in self.layers]

    def gradients(self, score: Tensor, *, retain_graph: bool = False) -> list[Float[Tensor, "B H N N"]]:
        """∂score/∂attention of each layer, by one backward pass. Needs `capture_attention(gradients=True)`.

        `score` is a scalar, or a number per image: images don't mix, so the sum's gradient holds each
        image's own.
        """
        gradients = self.heads_gradients(score, retain_graph=retain_graph)
        return [layer.attention_gradient(grad) for layer, grad in zip(self.layers, gradients, strict=True)]

    def heads_gradients(self, score: Tensor, *, retain_graph: bool = False) -> list[Tensor]:
        """∂score/∂heads of each layer, for `AttentionLayer.attention_gradient`."""
        heads = [layer.heads for layer in self.layers if layer.heads is not None]
        if not score.requires_grad or not all(tensor.requires_grad for tensor in heads):
            raise RuntimeError(
                "nothing to differentiate: use capture_attention(model, gradients=True) with gradients "
                "enabled, on parameters or images that require them"
            )
        return list(torch.autograd.grad(score.sum(), heads, retain_graph=retain_graph))


@contextmanager
def capture_attention(model: nn.Module, *, gradients: bool = False) -> Iterator[AttentionRecord]:
    """Record every layer's attention in the forward passes inside the `with`; the last one stays in the
    record.

    Raises ValueError for a model whose attention is not understood (hierarchical models, unknown layers).
    """
    layers = find_attention_layers(model)
    handles: list[RemovableHandle] = []
    try:
        for layer in layers:
            handles += layer.attach(gradients=gradients)
        yield AttentionRecord(layers)
    finally:
        for handle in handles:
            handle.remove()


def find_attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The model's self-attention layers in order, or ValueError with why they cannot be read."""
    family = type(model).__name__
    if any(word in family.lower() for word in _HIERARCHICAL):
        raise ValueError(
            f"{family} is hierarchical: it attends within windows or merges patches between stages, so no "
            f"attention between all of its input patches exists to be explained; known: {_SUPPORTED}"
        )
    layers: list[AttentionLayer] = []
    for block_name, block in model.named_modules():
        for name, module in block.named_children():
            kind = next((kind for kind in LAYER_KINDS if kind.matches(module, block)), None)
            if kind is not None:
                layers.append(kind(f"{block_name}.{name}".removeprefix("."), module, block))
    if not layers:
        raise ValueError(f"no attention layer of a known kind in {family}; known: {_SUPPORTED}")
    return layers


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
