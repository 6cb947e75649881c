"""The model: geometry, capture, initialisation, and what each option promises."""

import copy

import pytest
import torch

from vit.model.vision_transformer import VisionTransformer

OPTIONS = [
    {},
    {"pool": "avg"},
    {"pool": "max", "class_token": True},
    {"pool": "attention", "stem": "conv", "pos_embed": "sincos"},
    {"stem": "conv_pool", "mlp": "relu2", "pos_embed": "none"},
    {"mlp": "swiglu", "qk_norm": True, "init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True},
    {"distilled": True, "qkv_bias": False},
]


def tiny(**options: object) -> VisionTransformer:
    settings = {
        "img_size": (8, 16),
        "patch_size": 4,
        "num_classes": 5,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 4,
    }
    return VisionTransformer(**(settings | options))


@pytest.mark.parametrize("options", OPTIONS)
def test_forward_and_forward_with_attention_agree(options):
    torch.manual_seed(0)
    model, images = tiny(**options).eval(), torch.randn(2, 3, 8, 16)
    logits, attentions = model.forward_with_attention(images)
    torch.testing.assert_close(model(images), logits, atol=1e-5, rtol=0)
    tokens = model.num_prefix_tokens + 2 * 4
    assert [tuple(weights.shape) for weights in attentions] == [(2, 4, tokens, tokens)] * 3
    torch.testing.assert_close(attentions[1].sum(-1), torch.ones(2, 4, tokens))


@pytest.mark.parametrize("options", OPTIONS)
def test_every_parameter_receives_a_gradient(options):
    torch.manual_seed(0)
    model = tiny(**options)
    model(torch.randn(2, 3, 8, 16)).square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize("options", OPTIONS)
def test_architecture_rebuilds_the_model(options):
    model = tiny(**options)
    rebuilt = VisionTransformer(**model.architecture)
    rebuilt.load_state_dict(model.state_dict(), strict=True)
    assert rebuilt.architecture == model.architecture


@pytest.mark.parametrize(("pool", "pos_embed"), [("token", "learned"), ("avg", "sincos")])
def test_another_size_passes_only_where_it_is_let_through_and_trains_the_positions(
    pool: str, pos_embed: str
) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(16, 4, 3, 5, 16, 2, 2, pool=pool, pos_embed=pos_embed)
    small = torch.randn(2, 3, 8, 12)
    with pytest.raises(ValueError, match="set_input_size"):
        model(small)
    model.patch_embed.dynamic_img_size = True
    logits = model(small)
    logits.sum().backward()
    if pos_embed == "learned":
        assert model.pos_embed.grad.abs().sum() > 0
        expected = copy.deepcopy(model)
        expected.set_input_size((8, 12))
        torch.testing.assert_close(logits, expected(small))
