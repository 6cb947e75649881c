"""How to read the attention layers of each family of vision transformers, unmodified.

Supporting another family is one subclass of `AttentionLayer` in `LAYER_KINDS`.
"""

import math
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

EVERY_IMAGE = slice(None)
SUPPORTED = (
    "this project's models, timm's VisionTransformer, Eva and Beit, torchvision's VisionTransformer and Hugging Face's "
    "ViT, DeiT, DINOv2, DINOv3, BEiT, CLIP and SigLIP"
)
_MASKS = ("attention_mask", "attn_mask", "shared_rel_pos_bias")  # options of an attention module
_VERIFIED_QUERIES = 64  # queries whose result is compared; all of them would form the N×N matrix


class AttentionLayer:
    """One attention layer and what the last forward pass left of it.

    This class reads modules with timm's names (and `norm` before `proj`); subclasses read the other families.
    """

    projections: tuple[str, ...] = ("q_norm", "k_norm")  # submodules that give queries and keys
    others: tuple[str, ...] = ("num_heads", "scale", "qkv", "proj")  # what else the module is known by

    def __init__(self, name: str, module: nn.Module, block: nn.Module) -> None:
        self.name, self.block = name, block
        self.module: Any = module
        self.num_heads = int(_first_of(module, "num_heads", "num_attention_heads"))
        self.captured = False
        self.batch, self.num_tokens = 0, 0
        # [B, H, N, K], as the module's own code made them; None where they are projected from the tokens again
        self.query: Tensor | None = None
        self.key: Tensor | None = None
        self.options: dict[str, Any] = {}  # what the module was called with, besides the tokens
        self.tokens: Tensor | None = None  # [B, N, D], what entered the attention module; not always kept
        # with gradients only, still in the autograd graph; the block's tokens also where they are asked for:
        self.heads: Tensor | None = None  # [B, N, H·K]: O, the heads' results side by side
        self.block_input: Tensor | None = None  # [B, N, D], what entered the block
        self.block_tokens: Tensor | None = None  # [B, N, D], what left it
        self._gradients, self._verified = False, False

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        """Is `module`, a child of `block`, of this family?"""
        # branches in parallel (timm's ParallelThingsBlock) are Sequential: their attentions don't multiply
        return not isinstance(block, nn.Sequential) and all(
            hasattr(module, name) for name in (*cls.projections, *cls.others)
        )

    @property
    def scale(self) -> float:
        return float(_first_of(self.module, "scale", "scaling"))

    def query_and_key(self, images: slice) -> tuple[Tensor, Tensor]:
        """What attention multiplies, [b, H, N, K] each, before scaling."""
        if self.query is not None and self.key is not None:
            return self.query[images], self.key[images]
        assert self.tokens is not None
        with torch.no_grad():
            query, key = (self._split(self._project(self.tokens[images].detach(), which)) for which in (0, 1))
            has_norms = hasattr(self.module, "q_norm")
            return (self.module.q_norm(query), self.module.k_norm(key)) if has_norms else (query, key)

    def scaled_query_and_key(self, images: slice) -> tuple[Float[Tensor, "B H Nq K"], Float[Tensor, "B H N K"]]:
        """Attention is softmax(query keyᵀ) of these; at least float32."""
        query, key = self.query_and_key(images)
        return at_least_float32(query) * self.scale, at_least_float32(key)

    def bias(self) -> Float[Tensor, "#B #H #Nq N"] | None:
        """What is added to the scores before the softmax: a mask or a position bias."""
        masks = [self.options[name] for name in _MASKS if self.options.get(name) is not None]
        if not masks:
            return None
        mask: Tensor = masks[0].detach()
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)

    def scores(self, query: Tensor, key: Tensor, images: slice, rows: slice = slice(None)) -> Float[Tensor, "B H _ N"]:
        """What attention is the softmax of, for some rows, from what `scaled_query_and_key` gives for `images`."""
        scores, bias = query[:, :, rows] @ key.transpose(-2, -1), self.bias()
        if bias is None:
            return scores
        bias = bias if len(bias) == 1 else bias[images]
        return scores + (bias if bias.shape[2] == 1 else bias[:, :, rows]).to(scores.dtype)

    def attention(self, images: slice = EVERY_IMAGE) -> Float[Tensor, "B H Nq N"]:
        """The weights after the softmax: rows are queries and sum to one."""
        return self.scores(*self.scaled_query_and_key(images), images).softmax(dim=-1)

    def gradient_and_value(self, heads_gradient: Float[Tensor, "B Nq E"], images: slice) -> tuple[Tensor, Tensor]:
        """∂f/∂O [b, H, Nq, K] and V [b, H, N, K]; at least float32."""
        assert self.tokens is not None
        value = self._split(self._project(self.tokens[images].detach(), 2).detach())
        return at_least_float32(self._split(heads_gradient[images])), at_least_float32(value)

    def attention_gradient(self, heads_gradient: Tensor, images: slice = EVERY_IMAGE) -> Float[Tensor, "b H Nq N"]:
        """∂f/∂A = (∂f/∂O) Vᵀ, per head."""
        gradient, value = self.gradient_and_value(heads_gradient, images)
        return gradient @ value.transpose(-2, -1)

    def attach(
        self, *, gradients: bool, token_limit: int, block_tokens: bool = False, verify: bool = True
    ) -> list[RemovableHandle]:
        """Hook the module. Hooks only read; with `gradients`, what they keep stays in the graph. Tokens of more than
        `token_limit` bytes are kept instead of queries and keys, half the memory; those are then projected again."""
        self._gradients, self._verified = gradients, not verify

        def on_input(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            # (query, key, value) where a layer is called so: the last is what is attended to
            tokens = options["hidden_states"] if not args else args[2] if len(args) == 3 else args[0]
            if tokens.ndim != 3:
                kind = type(module).__name__
                raise ValueError(f"{self.name} ({kind}) attends within windows, not between all patches")
            self.tokens, self.options, self.captured = tokens, options, False
            self.query = self.key = None
            self.batch, self.num_tokens = tokens.shape[:2]

        def on_projection(kind: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if self.tokens is not None and self.tokens.nbytes <= token_limit:
                output = output.detach()
                # a copy where the output is a view, which would keep the whole qkv output alive
                setattr(self, kind, output.contiguous() if output.ndim == 4 else self._split(output))

        def on_block(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
            self.block_input = args[0] if args else options["hidden_states"]
            self.block_tokens = first_output(result)

        handles = [self.module.register_forward_pre_hook(on_input, with_kwargs=True), self._attach_heads()]
        for kind, name in zip(("query", "key"), self.projections, strict=False):
            handles.append(getattr(self.module, name).register_forward_hook(partial(on_projection, kind)))
        if gradients or block_tokens:
            handles.append(self.block.register_forward_hook(on_block, with_kwargs=True))
        return handles

    def _attach_heads(self) -> RemovableHandle:
        """Hook the submodule that O goes into."""
        receiver = _first_of(self.module, "norm", "o_proj", "out_proj", "proj")
        return cast("RemovableHandle", receiver.register_forward_pre_hook(lambda module, args: self._keep(args[0])))

    def _keep(self, heads: Tensor) -> None:
        """The last thing captured of a layer. Raises ValueError unless attention · value reproduces it."""
        if not self._verified and not self.module.training:  # attention dropout would make them differ
            self._verify(heads)
        self.captured = True
        self.heads = heads if self._gradients else None
        if self.query is not None and not self._gradients:
            self.tokens = None

    def _project(self, tokens: Float[Tensor, "B N D"], which: int) -> Float[Tensor, "B N E"]:
        """Queries (0), keys (1) or values (2), heads side by side."""
        letter, qkv = "qkv"[which], getattr(self.module, "qkv", None)
        if qkv is None:
            return cast("Tensor", getattr(self.module, f"{letter}_proj")(tokens))
        rows = slice(which * (size := qkv.out_features // 3), (which + 1) * size)
        separate = getattr(self.module, f"{letter}_bias", None)  # Eva adds its biases to a qkv without any
        return F.linear(tokens, qkv.weight[rows], separate if qkv.bias is None else qkv.bias[rows])

    @torch.no_grad()
    def _verify(self, heads: Tensor) -> None:
        actual = at_least_float32(heads[:1, :_VERIFIED_QUERIES])
        tolerance = 1e-3 if heads.dtype in (torch.float32, torch.float64) else 5e-2
        try:
            error = (self._expect_heads() - actual).abs().max()
        except RuntimeError:  # other shapes
            error = torch.tensor(math.inf)
        if error > tolerance * actual.abs().max():
            raise ValueError(
                f"{self.name} ({type(self.module).__name__}) computes something else than softmax(q kᵀ)·v, perhaps "
                f"with a mask or a position bias, so its attention cannot be recomputed; known: {SUPPORTED}"
            )
        self._verified = True

    def _expect_heads(self) -> Tensor:
        """What `heads` should be for the first queries of the first image."""
        assert self.tokens is not None
        one, rows = slice(1), slice(_VERIFIED_QUERIES)
        attention = self.scores(*self.scaled_query_and_key(one), one, rows).softmax(dim=-1)
        heads = attention @ at_least_float32(self._split(self._project(self.tokens[one], 2)))
        return self._project_heads(heads.transpose(1, 2).flatten(2))  # [1, rows, H·K]

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

    def query_and_key(self, images: slice) -> tuple[Tensor, Tensor]:
        query, key = super().query_and_key(images)
        rope = self.options.get("rope")
        if rope is None:
            return query, key
        (sine, cosine), half = rope.to(query.dtype).chunk(2, dim=-1), self.module.rotate_half
        return _rotate(query, cosine, sine, halves=half), _rotate(key, cosine, sine, halves=half)


class BeitLayer(AttentionLayer):
    """timm's BEiT: a bias for each distance between patches; queries and keys are not modules' outputs."""

    projections = ()
    others = ("num_heads", "scale", "qkv", "proj", "relative_position_bias_table")

    def bias(self) -> Float[Tensor, "#B #H #Nq N"] | None:
        shared = super().bias()  # by all layers
        if self.module.window_size is None:
            return shared
        own: Tensor = self.module._get_rel_pos_bias().detach()
        return own if shared is None else own + shared


class HuggingFaceLayer(AttentionLayer):
    """Hugging Face's vision transformers: separate projections; DINOv3's patches are rotated after them."""

    projections = ("q_proj", "k_proj")
    others = ("v_proj", "config")

    def query_and_key(self, images: slice) -> tuple[Tensor, Tensor]:
        query, key = super().query_and_key(images)
        rotation = self.options.get("position_embeddings")
        return (query, key) if rotation is None else (_rotate(query, *rotation), _rotate(key, *rotation))


class TorchvisionLayer(AttentionLayer):
    """torchvision's ViT: `nn.MultiheadAttention`, whose projections are not modules that run: queries and keys are
    projected again from its input. Its result is kept instead of O: being linear, ∂f/∂O is ∂f/∂result · W."""

    projections = ()

    @classmethod
    def matches(cls, module: nn.Module, block: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and type(block).__name__ == "EncoderBlock"

    @property
    def scale(self) -> float:
        return float(self.module.head_dim**-0.5)

    def gradient_and_value(self, heads_gradient: Float[Tensor, "B Nq E"], images: slice) -> tuple[Tensor, Tensor]:
        return super().gradient_and_value(heads_gradient @ self.module.out_proj.weight.detach(), images)

    def _attach_heads(self) -> RemovableHandle:
        hook = self.module.register_forward_hook(lambda module, args, result: self._keep(first_output(result)))
        return cast("RemovableHandle", hook)

    def _project_heads(self, heads: Tensor) -> Tensor:
        projection = self.module.out_proj
        return F.linear(heads, projection.weight.to(heads.dtype), projection.bias.to(heads.dtype))

    def _project(self, tokens: Float[Tensor, "B N D"], which: int) -> Float[Tensor, "B N E"]:
        rows = slice(which * self.module.embed_dim, (which + 1) * self.module.embed_dim)
        bias = self.module.in_proj_bias
        return F.linear(tokens, self.module.in_proj_weight[rows], None if bias is None else bias[rows])


LAYER_KINDS = (RotaryLayer, BeitLayer, AttentionLayer, HuggingFaceLayer, TorchvisionLayer)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision as float32; others as they are."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rotate(tensor: Tensor, cosine: Tensor, sine: Tensor, *, halves: bool = True) -> Tensor:
    """Rotary position embedding (Su et al. 2021, eq. 34) of patches, paired by halves of a head or by neighbours;
    prefix tokens have no position."""
    prefix, patches = tensor.tensor_split([tensor.shape[2] - sine.shape[-2]], dim=2)
    if halves:
        first, second = patches.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    else:
        turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
    return torch.cat([prefix, patches * cosine + turned * sine], dim=2)


def _first_of(module: Any, *names: str) -> Any:
    return next(getattr(module, name) for name in names if hasattr(module, name))


def first_output(result: Any) -> Tensor:
    """What a module returns, or the first of several."""
    return cast("Tensor", result[0] if isinstance(result, tuple) else result)
