"""timm is the oracle: same weights, same logits, same attention, at any geometry."""

import json
import re
import time
from functools import partial
from typing import Any

import huggingface_hub as hub
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from vit.model.modules import load_pretrained, load_timm
from vit.model.timm_weights import create_timm

# of Dosovitskiy et al. 2021, DeiT, DeiT III, DINOv2 without and with registers
TIMMS = [
    "vit_tiny_patch16_224",
    "vit_small_patch32_384",
    "vit_base_patch8_224",
    "vit_base_patch16_384",
    "vit_large_patch14_224",
    "deit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "deit3_medium_patch16_224",
    "deit3_large_patch16_384",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch14_dinov2",
]
# files of weights don't tell their number of heads
pytestmark = pytest.mark.filterwarnings("ignore:.*attention heads share")


def build_timm(name, *, depth, randomise):
    """timm's model of a name, cut to a few blocks: each is the same mathematics."""
    return randomise(timm.create_model(name, depth=depth))


@torch.no_grad()
def check_equality(theirs, ours, *, batch=1, dtype=torch.float32, tolerance=1e-6):
    """Logits to ten times the tolerance, and every layer's attention to it, against timm's unfused
    path."""
    theirs, ours = theirs.to(dtype), ours.to(dtype)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, 3, *ours.patch_embed.img_size, generator=generator, dtype=dtype)
    expected_attentions = []
    for block in theirs.blocks:
        block.attn.fused_attn = False
    keep = [block.attn.attn_drop.register_forward_hook(
        lambda _, __, weights: expected_attentions.append(weights)) for block in theirs.blocks]  # fmt: skip
    expected = theirs(images)
    for hook in keep:
        hook.remove()
    assert 0.1 < expected.std() < 10  # of a size at which the tolerance says something
    logits, attentions = ours.forward_with_attention(images)
    torch.testing.assert_close(logits, expected, atol=10 * tolerance, rtol=0)
    torch.testing.assert_close(ours(images), expected, atol=10 * tolerance, rtol=0)
    for attention, expected_attention in zip(attentions, expected_attentions, strict=True):
        torch.testing.assert_close(attention, expected_attention, atol=tolerance, rtol=0)


def is_large(name):
    return any(size in name for size in ("base", "large"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extended if is_large(name) else []) for name in TIMMS],
)
def test_ours_equals_timm_at_native_other_and_non_square_size(name, randomise):
    theirs = build_timm(name, depth=1 if is_large(name) else 2, randomise=randomise)
    ours = load_timm(theirs)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    if "dinov2" not in name:  # its native 1,370 tokens are slow
        check_equality(theirs, ours)
    side, _ = ours.patch_embed.patch_size
    for size in ((5 * side, 5 * side), (3 * side, 7 * side)):
        theirs.set_input_size(size)
        ours.set_input_size(size)
        assert ours.grid_size == theirs.patch_embed.grid_size
        check_equality(theirs, ours, batch=2)


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "deit3_small_patch16_224"])
def test_only_rounding_separates_ours_from_timm(name, randomise):
    theirs = build_timm(name, depth=2, randomise=randomise)
    check_equality(theirs, load_timm(theirs), dtype=torch.float64, tolerance=1e-13)


OPTIONS = {
    "registers without class token": {"class_token": False, "reg_tokens": 3, "global_pool": "avg"},
    "class token under mean pooling": {"global_pool": "avg", "no_embed_class": True},
    "norm before the mean": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "norms on queries and keys": {"qk_norm": True, "qkv_bias": False},
    "oblong patches, one channel": {"patch_size": (4, 2), "in_chans": 1},
    "no classes": {"num_classes": 0, "init_values": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_options_of_timm_load(name, randomise):
    size = {
        "img_size": (16, 24),
        "patch_size": 4,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
        "num_classes": 7,
    }
    theirs = randomise(timm.models.VisionTransformer(**(size | OPTIONS[name])))
    images = torch.randn(2, theirs.in_chans, 16, 24)
    torch.testing.assert_close(load_timm(theirs)(images), theirs(images), atol=1e-5, rtol=0)


REFUSED: dict[str, list[dict[str, Any]]] = {
    "doesn't compute this VisionTransformer": [
        {"global_pool": "map"},
        {"global_pool": "max"},
        {"global_pool": "avg", "pool_include_prefix": True},
        {"norm_layer": partial(nn.LayerNorm, eps=1e-5)},
        {"attn_layer": "diff"},
        {"act_layer": "relu"},
        {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU},
    ],
    # parameters that ours doesn't have or has in addition
    "norm_pre.weight is [32] there": [{"pre_norm": True}],
    "norm.weight is absent there": [{"final_norm": False}],
    "blocks.0.mlp.norm.weight is [128] there": [{"scale_mlp_norm": True}],
    "blocks.0.attn.norm.weight is [32] there": [{"scale_attn_norm": True}],
    "patch_embed.norm.weight is [32] there": [{"embed_norm_layer": "layernorm"}],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_ours_cannot_compute_is_refused_by_name(what):
    for options in REFUSED[what]:
        module = timm.models.VisionTransformer(16, 4, embed_dim=32, depth=1, num_heads=2, **options)
        with pytest.raises(ValueError, match=re.escape(what)):
            load_timm(module)


class TestSources:
    def test_unknown_name_lists_near_ones(self):
        for source in ("vit_tyny_patch16_224", "timm:vit_tyny_patch16_224"):
            with pytest.raises(
                (ValueError, OSError), match=r"did you mean (timm:)?vit_tiny_patch16_224"
            ):
                load_timm(source)

    @torch.no_grad()
    def test_folder_with_config(self, tmp_path, randomise):
        arguments = {"img_size": [32, 64], "depth": 1, "num_heads": 2, "num_classes": 5}
        theirs = randomise(timm.create_model("vit_tiny_patch16_224", **arguments))
        save_file(theirs.state_dict(), tmp_path / "model.safetensors")
        config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments, "num_classes": 5}
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"pretrained_cfg": {"input_size": [3, 32, 64], "crop_pct": 0.8}})
        )
        images = torch.randn(1, 3, 32, 64)
        torch.testing.assert_close(load_timm(tmp_path)(images), theirs(images), atol=1e-5, rtol=0)
        _, preprocess = load_pretrained(tmp_path, num_classes=7)
        assert preprocess["crop_pct"] == 0.8
        assert tuple(preprocess["image_size"]) == (32, 64)


class TestFineTuning:
    @pytest.fixture
    def source(self, tmp_path, randomise):
        theirs = randomise(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64))
        save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
        return tmp_path / "weights.safetensors"

    def test_new_head_and_resampled_positions(self, source):
        model, preprocess = load_pretrained(source, num_classes=7, drop_path_rate=0.2)
        model.set_input_size((48, 96))
        reference = load_timm(source)
        assert preprocess is None
        assert model.architecture["drop_path_rate"] == 0.2
        assert model.grid_size == (3, 6)
        assert model.head.weight.shape == (7, 192)
        assert 0.015 < model.head.weight.std() < 0.025
        reference.set_input_size((48, 96))
        reference.head = model.head
        images = torch.randn(2, 3, 48, 96)
        torch.testing.assert_close(model(images), reference(images))


def test_weights_that_cannot_be_downloaded_are_refused_at_once(tmp_path, monkeypatch):
    """The hub alone would try again for half a minute, or for minutes where nothing answers."""
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    before = time.monotonic()
    with pytest.raises(
        OSError, match=r"weights of 'vit_tiny_patch16_224' cannot be downloaded .*give its path"
    ):
        create_timm("vit_tiny_patch16_224")
    assert time.monotonic() - before < 8
    assert not hub.constants.HF_HUB_OFFLINE
