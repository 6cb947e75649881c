"""Encoders with `nn.MultiheadAttention(batch_first=False)`, written in ten manners, against a model
of the same weights that is written out in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vit

SIZE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 32, 8, 24, 3, 3, 5
GRID = SIZE // PATCH


class Layer(nn.Module):
    """The weights of one layer, used in several manners."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def attend(self, x: Tensor, *, need_weights: bool = False) -> Tensor:
        return self.attention(x, x, x, need_weights=need_weights)[0]


class InnerBlock(Layer):
    """Tokens first inside of the block alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x).transpose(0, 1)).transpose(0, 1)
        return x + self.mlp(self.norm2(x))


class TokensFirstBlock(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), need_weights=True)
        return x + self.mlp(self.norm2(x))


class InPlaceBlock(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y += self.attend(self.norm1(x).permute(1, 0, 2)).permute(1, 0, 2)
        return y + self.mlp(self.norm2(y))


class PostNormBlock(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.mlp(x))


class Turned(nn.Module):
    """A module that takes [batch, tokens, channels] and attends tokens first."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module, function: nn.Module) -> None:
        super().__init__()
        self.norm, self.function = norm, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm(x))


class Residual(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.norm(x))


class AddsOutside(nn.Module):
    """The encoder adds what its modules give."""

    def __init__(
        self, layers: list[Layer], *, given_first: bool = False, norm: bool = True
    ) -> None:
        super().__init__()
        self.given_first, self.norm = given_first, norm
        self.attentions = nn.ModuleList(
            Normed(one.norm1, Turned(one.attention)) if norm else Turned(one.attention)
            for one in layers
        )
        self.norms = nn.ModuleList(one.norm1 for one in layers)
        self.mlps = nn.ModuleList(Normed(one.norm2, one.mlp) for one in layers)

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm, mlp in zip(self.attentions, self.norms, self.mlps, strict=True):
            given = attention(x if self.norm else norm(x))
            x = given.add(x) if self.given_first else x + given
            x = mlp(x) + x
        return x


class Between(nn.Module):
    """Tokens first between its first and its last module."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.permute(1, 0, 2)).permute(1, 0, 2)


class CalledOutside(nn.Module):
    """Attention that the encoder itself calls, tokens first."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer.attend(layer.norm1(x).transpose(0, 1)).transpose(0, 1)
            x = x + layer.mlp(layer.norm2(x))
        return x


class Classifier(nn.Module):
    def __init__(self, encode: Callable[[list[Any]], nn.Module], kind: type = Layer) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, GRID**2 + 1, WIDTH))
        self.parts = [kind() for _ in range(DEPTH)]
        self.encoder = encode(self.parts)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])


def sequence(layers: list[Layer]) -> nn.Module:
    return nn.Sequential(*layers)


def pairs(layers: list[Layer]) -> nn.Module:
    blocks: list[nn.Module] = []
    for one in layers:
        attention = Residual(one.norm1, Turned(one.attention))
        blocks.append(nn.Sequential(attention, Residual(one.norm2, one.mlp)))
    return nn.Sequential(*blocks)


def torch_encoder(layers: list[Layer]) -> nn.Module:
    encoder = nn.ModuleList()
    for one in layers:
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", norm_first=True, batch_first=False
        )
        layer.self_attn, layer.norm1, layer.norm2 = one.attention, one.norm1, one.norm2
        layer.linear1, layer.linear2 = one.mlp[0], one.mlp[2]
        encoder.append(layer)
    return Between(nn.Sequential(*encoder))


ENCODERS: dict[str, Callable[[], Classifier]] = {
    "turned inside of the block": lambda: Classifier(sequence, InnerBlock),
    "turned around the encoder": lambda: Classifier(
        lambda layers: Between(sequence(layers)), TokensFirstBlock
    ),
    "added in place in the block": lambda: Classifier(sequence, InPlaceBlock),
    "norms after the additions": lambda: Classifier(
        lambda layers: Between(sequence(layers)), PostNormBlock
    ),
    "modules that add": lambda: Classifier(pairs),
    "an encoder that adds": lambda: Classifier(AddsOutside),
    "an encoder that adds to what it gets": lambda: Classifier(
        lambda layers: AddsOutside(layers, given_first=True)
    ),
    "an encoder that norms and adds": lambda: Classifier(
        lambda layers: AddsOutside(layers, norm=False)
    ),
    "attention that the encoder calls": lambda: Classifier(CalledOutside),
    "torch's layers": lambda: Classifier(torch_encoder),
}


def build(create: Callable[[], Classifier]) -> tuple[Classifier, Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create().eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model, torch.randn(2, 3, SIZE, SIZE, generator=generator)


class Reference:
    """The same function written out: gates of the tokens, and LibraGrad's constants."""

    def __init__(self, model: Classifier, images: Tensor, *, libra: bool) -> None:
        self.libra = libra
        self.inputs: list[Tensor] = []
        self.attentions: list[Tensor] = []
        self.images = images.double().requires_grad_()
        self.gates = torch.ones(2, GRID**2 + 1, dtype=torch.float64, requires_grad=True)
        patches = F.conv2d(self.images, model.patches.weight, model.patches.bias, PATCH)
        x = torch.cat([model.cls_token.expand(2, -1, -1), patches.flatten(2).mT], dim=1)
        x = x + model.positions
        for layer in model.parts:
            self.inputs.append(x)
            if isinstance(layer, PostNormBlock):
                x = self.norm(layer.norm1, x + self.attend(layer.attention, x))
                x = self.norm(layer.norm2, x + self.mlp(layer.mlp, x))
            else:
                x = x + self.attend(layer.attention, self.norm(layer.norm1, x))
                x = x + self.mlp(layer.mlp, self.norm(layer.norm2, x))
        self.logits = model.head(self.norm(model.norm, x)[:, 0])

    def hold(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if self.libra else tensor

    def norm(self, norm: nn.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        deviation = (centred.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt()
        return centred / self.hold(deviation) * norm.weight + norm.bias

    def attend(self, attention: nn.MultiheadAttention, x: Tensor) -> Tensor:
        parts = F.linear(x, attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.mT * (WIDTH // HEADS) ** -0.5 + self.gates[:, None, None].log()
        weights = self.hold(scores.exp() / scores.exp().sum(dim=-1, keepdim=True))
        self.attentions.append(weights)
        return attention.out_proj((weights @ v).transpose(1, 2).flatten(2))

    def mlp(self, mlp: nn.Sequential, x: Tensor) -> Tensor:
        hidden = mlp[0](x)
        return mlp[2](hidden * self.hold(F.gelu(hidden) / hidden))


def compute_references(model: Classifier, images: Tensor) -> dict[str, Tensor]:
    """Maps [2, patches] of the first class."""
    model = model.double()
    libra = Reference(model, images, libra=True)
    gradients = torch.autograd.grad(libra.logits[:, 0].sum(), [*libra.inputs, libra.images])
    fullgrad = sum(
        (x.detach() * g).sum(dim=-1) for x, g in zip(libra.inputs, gradients, strict=False)
    )[:, 1:]
    pixels = libra.images.detach()
    product = (pixels - pixels.mean(dim=(-2, -1), keepdim=True)) * gradients[-1]
    pixel_map = product.unflatten(2, (GRID, PATCH)).unflatten(4, (GRID, PATCH))
    pixel_map = pixel_map.sum(dim=(1, 3, 5)).flatten(1)

    plain = Reference(model, images, libra=False)
    probability = plain.logits.softmax(dim=1)[:, 0]
    (removal,) = torch.autograd.grad(probability.sum(), plain.gates)
    parts = (fullgrad, pixel_map, removal[:, 1:])
    rollout = torch.eye(GRID**2 + 1).double()[:1].expand(2, 1, -1)
    for weights in reversed(plain.attentions):
        rollout = (rollout + rollout @ weights.mean(dim=1)) / 2
    return {
        "rollout": rollout[:, 0, 1:].detach(),
        "libra-fullgrad": fullgrad,
        "removal-gradient": removal[:, 1:],
        "libra-removal": torch.stack([one / one.std(dim=-1, keepdim=True) for one in parts]).mean(
            dim=0
        ),
    }


@pytest.mark.parametrize("name", ENCODERS)
def test_maps_are_those_of_the_written_out_model(name: str) -> None:
    model, images = build(ENCODERS[name])
    found = {
        method: vit.attribute(model, images, method=method, target=[0, 0]).flatten(1)
        for method in ("rollout", "libra-fullgrad", "removal-gradient", "libra-removal")
    }
    logits = model(images)
    expected = compute_references(model, images)
    torch.testing.assert_close(
        logits.double(), Reference(model, images, libra=False).logits, rtol=1e-4, atol=1e-4
    )
    for method, values in expected.items():
        error = (found[method] - values).abs().max()
        assert error < 1e-4 * values.abs().max(), method
