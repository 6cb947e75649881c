"""Models whose maps would be plausible and wrong are refused, however they are written; what looks
like them and is right is read."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import vit
from tests.explanation.capture.hand_written import (
    CLASSES,
    SIZE,
    TOKENS,
    WIDTH,
    Classifier,
    PreNormBlock,
    blocks,
    build,
    by_hand,
    own,
    scaled_fused,
    tensor_softmax,
)
from vit.explanation.capture.forward import run_forward

Order = Callable[[int], list[int]]
PLACES = "before the first attention layer that can be read"
ELSEWHERE = "mixes tokens elsewhere .* or attends to them in another order"
PART = "shows a part of the model"
NONE = "has no attention between all of its tokens"
RESIDUAL = "isn't added once and alone to tokens"


def attention() -> nn.Module:
    return own("chunk", tensor_softmax)()


class Ordered(nn.Module):
    """Tokens in another order within a module, and back."""

    def __init__(self, inner: nn.Module, order: Order) -> None:
        super().__init__()
        self.inner, self.order = inner, order

    def forward(self, x: Tensor) -> Tensor:
        order = torch.tensor(self.order(x.shape[1]))
        return self.inner(x[:, order])[:, order.argsort()]


def turn_patches(count: int) -> list[int]:
    return [0, *range(1, count)[::-1]]


def interleave(count: int) -> list[int]:
    """Two rows of patches in turn, as serialised point clouds have them."""
    return [0, *sorted(range(1, count), key=lambda place: ((place - 1) // 8, (place - 1) % 4))]


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], x[:, 1:].flip(1)], dim=1)


class Silent(nn.Module):
    """Attention that is multiplied by 0, as before a training (ReZero)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.inner(x)


class ChannelAttention(nn.Module):
    """Attention between channels (XCiT), of which each head has as many as there are tokens."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        width = 2 * TOKENS
        self.qkv, self.fused = nn.Linear(width, 3 * width), fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, TOKENS)).permute(2, 0, 3, 4, 1)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(dim=-1) @ v
        return out.permute(0, 3, 1, 2).flatten(2)


class ChannelClassifier(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(3, 2 * TOKENS, 8, 8)
        self.layers = nn.ModuleList(ChannelAttention(fused=fused) for _ in range(2))
        self.head = nn.Linear(2 * TOKENS, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).mT
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(dim=1))


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return q.sigmoid() @ (k.sigmoid().mT @ v) / x.shape[1]


class AddMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(dim=1, keepdim=True)


def begin_with(first: Callable[[], nn.Module]) -> nn.Module:
    """No class token, whose change would show it."""
    encoder = nn.Sequential(PreNormBlock(first()), PreNormBlock(attention()))
    return Classifier(encoder, tokens=0, pool="mean")


class Encoder(nn.Module):
    """Four blocks, and something that leads around them."""

    def __init__(self, run: Callable[["Encoder", Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNormBlock(attention()) for _ in range(4))
        self.project, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def skip(encoder: Encoder, x: Tensor) -> Tensor:
    """As in a U-ViT."""
    first = encoder.blocks[0](x)
    inner = encoder.blocks[2](encoder.blocks[1](first))
    return encoder.blocks[3](encoder.join(torch.cat([inner, first], dim=-1)))


def average(encoder: Encoder, x: Tensor) -> Tensor:
    """As in a DenseFormer."""
    outputs = [x]
    for block in encoder.blocks:
        outputs.append(block(torch.stack(outputs).mean(dim=0)))
    return outputs[-1]


def add_embedding(encoder: Encoder, x: Tensor) -> Tensor:
    return nn.Sequential(*encoder.blocks)(x) + encoder.project(x)


def add_class_tokens(encoder: Encoder, x: Tensor) -> Tensor:
    """As DINOv2's linear classifier, which reads the class tokens of several blocks."""
    total = torch.zeros_like(x[:, :1])
    for block in encoder.blocks:
        x = block(x)
        total = total + x[:, :1]
    return torch.cat([total, x[:, 1:]], dim=1)


class Wrapper(nn.Module):
    """A model whose forward pass is `compute` of the images and the inner models."""

    def __init__(self, compute: Callable[..., Tensor], *models: nn.Module) -> None:
        super().__init__()
        self.models, self.compute = nn.ModuleList(models), compute

    def forward(self, images: Tensor) -> Tensor:
        return self.compute(images, *self.models)


def add(images: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return first(images) + second(images)


def one() -> nn.Module:
    return Classifier(blocks(attention))


def convolve() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


class Patches(nn.Module):
    """Patches of any convolution, without prefix tokens."""

    def __init__(self, *convolution: int) -> None:
        super().__init__()
        self.patchify, self.encoder = nn.Conv2d(3, WIDTH, *convolution), blocks(attention)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.patchify(images).flatten(2).mT).mean(dim=1))


class Strips(Classifier):
    """Strips of two rows, which a reshape makes."""

    def embed(self, images: Tensor) -> Tensor:
        return self.patchify(images.reshape(len(images), 3, TOKENS, -1).transpose(1, 2).flatten(2))


class WithoutResidual(nn.Module):
    def __init__(self, *, feed_forward: bool) -> None:
        super().__init__()
        self.attention, self.mlp = attention(), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.mlp(x) if self.feed_forward else x


class Convolve(nn.Module):
    """Each token takes from its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(x.mT).mT


class DeepPrompts(nn.Module):
    """Prompts that are others in each block (Jia et al. 2022)."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.inner, self.prompts = first, nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        prompts = self.prompts.expand(len(x), -1, -1)
        return self.inner(torch.cat([x[:, :1], prompts, x[:, 4:]], dim=1))


def sequence(*layers: nn.Module) -> nn.Module:
    """Layers between two blocks."""
    return Classifier(
        nn.Sequential(PreNormBlock(attention()), *layers, PreNormBlock(attention())), tokens=4
    )


def tiny(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    settings = {"img_size": SIZE, "patch_size": 8, "depth": 2, "num_classes": 5}
    return timm.create_model(name, **settings | options)


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    # the order of the tokens
    "patches turned in each fused attention": (
        lambda: Classifier(blocks(lambda: Ordered(own("chunk", scaled_fused)(), turn_patches))),
        ELSEWHERE,
    ),
    "rows in turn in one layer": (
        lambda: sequence(PreNormBlock(Ordered(attention(), interleave))),
        ELSEWHERE,
    ),
    "another order between blocks": (lambda: sequence(Turn()), ELSEWHERE),
    "another order of the encoder": (
        lambda: Classifier(Ordered(blocks(attention), interleave)),
        PLACES,
    ),
    # attention that is none between tokens, or isn't seen
    "channels": (lambda: ChannelClassifier(fused=False), "between channels"),
    "channels, fused": (lambda: ChannelClassifier(fused=True), "between channels"),
    "without an effect": (lambda: sequence(Silent()), "multiplied by 0 as before training"),
    "exponentials by hand": (lambda: Classifier(blocks(own("chunk", by_hand))), NONE),
    "exponentials by hand in one layer": (
        lambda: sequence(PreNormBlock(own("chunk", by_hand)())),
        ELSEWHERE,
    ),
    "a convolution": (lambda: sequence(Convolve()), ELSEWHERE),
    "linear attention first": (lambda: begin_with(LinearAttention), PLACES),
    "exponentials by hand first": (lambda: begin_with(own("chunk", by_hand)), PLACES),
    "the mean is added first": (lambda: begin_with(AddMean), PLACES),
    "ConViT": (lambda: tiny("convit_tiny", depth=3, local_up_to_layer=2), PLACES),
    # what leads around the tokens
    "no residual connection": (lambda: sequence(WithoutResidual(feed_forward=False)), RESIDUAL),
    "an addition after the attention": (
        lambda: sequence(WithoutResidual(feed_forward=True)),
        RESIDUAL,
    ),
    "deep prompts": (
        lambda: sequence(DeepPrompts(PreNormBlock(attention()))),
        "doesn't keep the tokens before it",
    ),
    "skip connections": (lambda: Classifier(Encoder(skip)), PART),
    "averages of blocks": (lambda: Classifier(Encoder(average)), PART),
    "the embedding is added last": (
        lambda: Classifier(Encoder(add_embedding), pool="mean"),
        PART,
    ),
    "class tokens of four blocks": (lambda: Classifier(Encoder(add_class_tokens)), PART),
    "two encoders": (lambda: Wrapper(add, one(), one()), PART),
    "late fusion": (lambda: Wrapper(add, one(), convolve()), PART),
    "test-time augmentation": (
        lambda: Wrapper(lambda x, model: model(x) + model(x.flip(-1)), one()),
        RESIDUAL,
    ),
    # where the patches lie
    "strips": (
        lambda: Strips(blocks(attention), patches="reshape", tokens=0, pool="mean"),
        PLACES,
    ),
    "overlapping patches without a border": (lambda: Patches(16, 4), PLACES),
    "a crop of a quarter of a patch": (
        lambda: Wrapper(lambda x, m: m(x[..., 2:-2, 2:-2]), tiny(img_size=28, patch_size=7)),
        PLACES,
    ),
    "a border": (
        lambda: Wrapper(lambda x, m: m(F.pad(x, (0, 8, 0, 8))), tiny(img_size=40)),
        PLACES,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_refused_in_a_sentence(name: str) -> None:
    create, message = WRONG[name]
    model, images = build(create)
    with pytest.raises(ValueError, match=message):
        vit.attribute(model, images, method="rollout")


@pytest.mark.parametrize(
    "name",
    ["rows in turn in one layer", "the mean is added first", "averages of blocks", "late fusion"],
)
def test_a_wrong_model_of_very_many_tokens_is_refused_by_the_first_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("reader", "verification"):
        path = f"vit.explanation.capture.{module}"
        monkeypatch.setattr(f"{path}.MANY_TOKENS", 8)
        monkeypatch.setattr(f"{path}.FEW_TOKENS", 12)
    test_a_wrong_model_is_refused_in_a_sentence(name)
    model, images = build(lambda: Classifier(blocks(attention)))
    assert run_forward(model, images).reader.can_drop_tokens


class Columns(Classifier):
    """Patches column by column, as those of the turned image."""

    def embed(self, images: Tensor) -> Tensor:
        return super().embed(images.mT)


def test_patches_without_a_convolution_keep_rows_and_columns() -> None:
    for kind in (Classifier, Columns):
        model, images = build(partial(kind, blocks(attention), patches="unfold"))
        for shape in ((16, 64), (64, 16)):
            photos = images.reshape(2, 3, *shape)
            if kind is Classifier:
                found = vit.attribute(model, photos, method="rollout")
                assert found.shape == (2, shape[0] // 8, shape[1] // 8)
            else:
                with pytest.raises(ValueError, match=PLACES):
                    vit.attribute(model, photos, method="rollout")


@pytest.mark.parametrize("convolution", [(7, 4, 3), (12, 8, 2)])
def test_overlapping_patches_with_a_border_are_read(convolution: tuple[int, ...]) -> None:
    model, images = build(lambda: Patches(*convolution))
    assert run_forward(model, images).reader.has_attention


@pytest.mark.parametrize("channels", [1, 8])
def test_images_of_any_number_of_channels_are_read(channels: int) -> None:
    model, _ = build(lambda: tiny(in_chans=channels))
    images = torch.randn(2, channels, SIZE, SIZE)
    for method in ("rollout", "libra-removal"):
        assert vit.attribute(model, images, method=method).shape == (2, 4, 4)


def test_a_mask_of_late_queries_is_part_of_the_attention() -> None:
    """It first acts after the queries that are verified."""
    mask = torch.ones(101, 101, dtype=torch.bool)
    mask[70:, 90:] = False
    weights: list[Tensor] = []

    def masked(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        weights[:] = [scores.softmax(dim=-1)]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def create() -> nn.Module:
        model = Classifier(blocks(own("chunk", masked)))
        model.pos = nn.Parameter(torch.zeros(1, 101, WIDTH))
        return model

    model, _ = build(create)
    images = torch.randn(1, 3, 80, 80)
    with torch.no_grad(), vit.capture_attention(model) as record:
        model(images)
    assert not record.attentions[-1][:, :, 70:, 90:].any()
    torch.testing.assert_close(record.attentions[-1], weights[0])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = blocks(attention)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_penalty_on_attention_outside_of_the_graph_is_an_error() -> None:
    model, images = build(lambda: Classifier(Checkpointed()))
    with vit.capture_attention(model, gradients=True) as record:
        model(images.requires_grad_())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        _ = record.attentions


def test_frozen_blocks_have_no_gradient_and_the_others_theirs() -> None:
    model, images = build(lambda: Classifier(blocks(attention)))
    with vit.capture_attention(model, gradients=True) as record:
        expected = record.gradients(model(images)[:, 1])
    model.requires_grad_(False)
    model.encoder[-1].requires_grad_(True)
    with vit.capture_attention(model, gradients=True) as record:
        found = record.gradients(model(images)[:, 1])
    assert not found[0].any()
    torch.testing.assert_close(found[-1], expected[-1])
