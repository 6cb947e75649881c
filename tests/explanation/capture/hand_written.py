"""Vision transformers as people write them, in several manners: what the watching
of softmax and of torch's attention has to find. Each is tiny and has two layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# While this is a list, attention is computed by products alone, and its weights are kept here.
reference: list[Tensor] | None = None


def note(weights: Tensor) -> Tensor:
    """Keep the weights [B, H, N, N] and their gradient."""
    if reference is not None:
        weights.retain_grad()
        reference.append(weights)
    return weights


def fused(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.0, **options: Any) -> Tensor:
    """torch's fused attention, or the formula."""
    if reference is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale or None, **options)
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    return note(scores.exp() / scores.exp().sum(dim=-1, keepdim=True)) @ v


SIZE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 32, 8, 24, 3, 2, 5
TOKENS = (SIZE // PATCH) ** 2
HEAD = WIDTH // HEADS


class Softmaxed(nn.Module):
    """Attention whose product, softmax and projections are written in the given way."""

    def __init__(
        self, project: str, attend: Callable[..., Tensor], *, kv_heads: int = HEADS
    ) -> None:
        super().__init__()
        self.project, self.attend_by, self.kv_heads = project, attend, kv_heads
        narrow = kv_heads * HEAD
        if project in ("chunk", "split", "unbind", "permute"):
            self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=project != "chunk")
        else:
            self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, narrow)
            self.value = nn.Linear(WIDTH, narrow)
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.mix = nn.Linear(HEADS, HEADS)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        if self.project == "chunk":
            parts = self.to_qkv(x).chunk(3, dim=-1)
        elif self.project == "split":
            parts = torch.split(self.to_qkv(x), WIDTH, dim=2)
        elif self.project == "unbind":
            return self.to_qkv(x).view(b, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.project == "permute":
            qkv = self.to_qkv(x).reshape(b, n, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
            return qkv[0], qkv[1], qkv[2]
        else:
            parts = self.query(x), self.key(x), self.value(x)
        q, k, v = (part.reshape(b, n, -1, HEAD).transpose(1, 2) for part in parts)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        out = self.attend_by(self, q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(x.shape))


def torch_softmax(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(
        note(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / HEAD**0.5, -1)), v
    )


def functional_softmax(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(q @ k.mT * HEAD**-0.5, dim=3)
    return F.dropout(note(weights), 0.1, self.training) @ v


def tensor_softmax(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return note((q * HEAD**-0.5 @ k.transpose(-2, -1)).softmax(-1)) @ v


def module_softmax(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(self.drop(note(self.softmax(q @ k.mT / math.sqrt(HEAD)))), v)


def einsum(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) * HEAD**-0.5).softmax(dim=-1)
    return torch.einsum("b h i j, b h j d -> b h i d", note(weights), v)


def einsum_tokens_first(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).div(HEAD**0.5).softmax(-1)
    return torch.einsum("bkhd,bhqk->bqhd", v.transpose(1, 2), note(weights)).transpose(1, 2)


def batched(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.mT) * HEAD**-0.5, dim=-1)
    weights = note(weights.unflatten(0, (-1, HEADS))).flatten(0, 1)
    return torch.bmm(weights, v).unflatten(0, (-1, HEADS))


def scaled_fused(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(q, k, v, scale=0.7)


def grouped_fused(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(q, k, v, enable_gqa=True)


def shared_values(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-query attention."""
    return note((q @ k.mT * HEAD**-0.5).softmax(-1)) @ v


def rotate(tensor: Tensor) -> Tensor:
    angles = torch.arange(tensor.shape[-2])[:, None] * torch.linspace(1, 0.1, HEAD // 2)
    first, second = tensor.chunk(2, dim=-1)
    sine, cosine_ = angles.sin().to(tensor), angles.cos().to(tensor)
    return torch.cat([first * cosine_ - second * sine, first * sine + second * cosine_], dim=-1)


def rotary(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(rotate(q), rotate(k), v)


def mixed_before(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Talking heads before the softmax."""
    scores = self.mix((q @ k.mT * HEAD**-0.5).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return note(scores.softmax(dim=-1)) @ v


def by_hand(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.exp(q @ k.mT * HEAD**-0.5)
    return weights / weights.sum(dim=-1, keepdim=True) @ v


def attend_by_products(
    module: nn.MultiheadAttention, x: Tensor, *others: Tensor, **options: object
) -> tuple[Tensor, None]:
    """What a `nn.MultiheadAttention` computes."""
    x = x if module.batch_first else x.transpose(0, 1)
    qkv = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
    out = module.out_proj(fused(q, k, v).transpose(1, 2).flatten(2))
    return out if module.batch_first else out.transpose(0, 1), None


class TorchAttention(nn.Module):
    def __init__(self, *, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=batch_first)
        self.batch_first, self.need_weights = batch_first, need_weights

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.permute(1, 0, 2)
        out, _ = self.mha(x, x, x, need_weights=self.need_weights)
        return out if self.batch_first else out.permute(1, 0, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, WIDTH))


class PreNormBlock(nn.Module):
    def __init__(self, attention: nn.Module, *, scale: bool = False) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention, mlp()
        self.gamma = nn.Parameter(torch.ones(WIDTH)) if scale else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attention(self.ln1(x))
        return x + self.gamma * self.mlp(self.ln2(x))


class PostNormBlock(PreNormBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(x + self.attention(x))
        return self.ln2(x + self.mlp(x))


class InPlaceBlock(PreNormBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y += self.attention(self.ln1(x))
        return y + self.mlp(self.ln2(y))


class ParallelBlock(PreNormBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        return x + self.attention(y) + self.mlp(y)


class PreNorm(nn.Module):
    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class PairsOfLayers(nn.Module):
    """The encoder adds what its layers compute."""

    def __init__(self, attention: Callable[[], nn.Module], *, norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([PreNorm(attention()), PreNorm(mlp())]) for _ in range(DEPTH)
        )
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
        return self.norm(x)


class TokensFirst(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.transpose(0, 1)).transpose(0, 1)


class Classifier(nn.Module):
    """Patches, positions, an encoder and a head."""

    def __init__(
        self,
        encoder: nn.Module,
        *,
        patches: str = "conv",
        tokens: int = 1,
        pool: str = "class",
        num_classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.patches, self.pool = patches, pool
        if patches == "conv":
            self.patchify = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        else:
            self.patchify = nn.Linear(3 * PATCH**2, WIDTH)
        self.special = nn.Parameter(torch.zeros(1, tokens, WIDTH))
        self.pos = nn.Parameter(torch.zeros(1, TOKENS + tokens, WIDTH))
        self.drop, self.encoder = nn.Dropout(0.1), encoder
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_classes))
        self.score = nn.Linear(WIDTH, 1)

    def embed(self, images: Tensor) -> Tensor:
        if self.patches == "conv":
            return self.patchify(images).flatten(2).transpose(1, 2)
        if self.patches == "unfold":
            return self.patchify(F.unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        b, rows = len(images), SIZE // PATCH
        squares = images.reshape(b, 3, rows, PATCH, rows, PATCH).permute(0, 2, 4, 3, 5, 1)
        return self.patchify(squares.reshape(b, TOKENS, -1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        x = torch.cat([self.special.expand(len(x), -1, -1), x], dim=1)
        x = self.encoder(self.drop(x + self.pos))
        if self.pool == "class":
            x = x[:, 0]
        elif self.pool == "mean":
            x = x[:, self.special.shape[1] :].mean(dim=1)
        else:  # a weighted mean
            x = (self.score(x).softmax(dim=1).mT @ x)[:, 0]
        return self.head(x)


@dataclass(frozen=True)
class HandWritten:
    build: Callable[[], nn.Module]
    drops_tokens: bool = True  # tokens can be left out


def blocks(
    attention: Callable[[], nn.Module], block: Any = PreNormBlock, **options: Any
) -> nn.Module:
    return nn.Sequential(*(block(attention(), **options) for _ in range(DEPTH)))


def own(
    project: str, attend: Callable[..., Tensor], kv_heads: int = HEADS
) -> Callable[[], nn.Module]:
    return lambda: Softmaxed(project, attend, kv_heads=kv_heads)


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, **options)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False)


def torch_attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: TorchAttention(**options)


MODELS: dict[str, HandWritten] = {
    "torch.softmax, chunk": HandWritten(lambda: Classifier(blocks(own("chunk", torch_softmax)))),
    "F.softmax, split, mean": HandWritten(
        lambda: Classifier(blocks(own("split", functional_softmax)), pool="mean", tokens=0)
    ),
    "Tensor.softmax, unbind, unfold": HandWritten(
        lambda: Classifier(blocks(own("unbind", tensor_softmax)), patches="unfold")
    ),
    "einsum, separate projections": HandWritten(
        lambda: Classifier(blocks(own("", einsum)), patches="reshape")
    ),
    "einsum, values first": HandWritten(
        lambda: Classifier(blocks(own("", einsum_tokens_first)), pool="mean", tokens=4)
    ),
    "bmm, heads in the batch": HandWritten(
        lambda: Classifier(blocks(own("permute", batched)), tokens=5)
    ),
    "fused with a scale, LayerScale": HandWritten(
        lambda: Classifier(blocks(own("chunk", scaled_fused), scale=True))
    ),
    "fused, grouped queries": HandWritten(lambda: Classifier(blocks(own("", grouped_fused, 1)))),
    "one head of values": HandWritten(lambda: Classifier(blocks(own("", shared_values, 1)))),
    "rotary": HandWritten(
        lambda: Classifier(blocks(own("", rotary)), tokens=0, pool="mean"), False
    ),
    "talking heads before the softmax": HandWritten(
        lambda: Classifier(blocks(own("chunk", mixed_before)))
    ),
    "post-norm": HandWritten(
        lambda: Classifier(blocks(own("chunk", torch_softmax), PostNormBlock))
    ),
    "added in place to a copy": HandWritten(
        lambda: Classifier(blocks(own("chunk", scaled_fused), InPlaceBlock))
    ),
    "parallel branches": HandWritten(
        lambda: Classifier(blocks(own("chunk", scaled_fused), ParallelBlock))
    ),
    "one layer that runs twice": HandWritten(
        lambda: Classifier(nn.Sequential(*(2 * [PreNormBlock(own("", tensor_softmax)())])))
    ),
    "encoder that adds": HandWritten(
        lambda: Classifier(PairsOfLayers(own("chunk", module_softmax), norm=True))
    ),
    "nn.MultiheadAttention": HandWritten(
        lambda: Classifier(blocks(torch_attention(batch_first=True, need_weights=True)))
    ),
    "nn.MultiheadAttention, tokens first": HandWritten(
        lambda: Classifier(blocks(torch_attention(batch_first=False, need_weights=False)))
    ),
    "nn.TransformerEncoder, norm last": HandWritten(lambda: Classifier(encoder(batch_first=True))),
    "nn.TransformerEncoder, tokens first": HandWritten(
        lambda: Classifier(TokensFirst(encoder(norm_first=True)))
    ),
    "weighted mean": HandWritten(
        lambda: Classifier(blocks(own("", tensor_softmax)), pool="weighted", tokens=0)
    ),
}


def build(create: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """A model with noise added to its weights, in evaluation mode, and two images."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model, torch.randn(2, 3, SIZE, SIZE, generator=generator)
