"""Every preset: its size and work pinned, its options alive."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from vit.model.presets import PRESETS, compute_flops
from vit.model.vision_transformer import VisionTransformer

# parameters, and floating-point operations of one image's forward pass (two a multiply-add)
PINNED = {
    "vit_tiny_patch16_224": (5_717_416, 2_507_366_400),
    "vit_small_patch16_224": (22_050_664, 9_197_764_608),
    "vit_base_patch16_224": (86_567_656, 35_127_656_448),
    "vit_large_patch16_224": (304_326_632, 123_109_425_152),
    "vit_nano_patch4_32": (545_930, 76_286_464),
    "vit_micro_patch4_32": (1_806_154, 246_550_272),
    "vit_mini_patch4_32": (3_721_738, 500_700_160),
}


def build(name, **changes):
    return VisionTransformer(**(PRESETS[name] | changes))


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_and_flops_are_pinned(name):
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(name).parameters())
    assert (parameters, compute_flops(PRESETS[name])) == PINNED[name]


@pytest.mark.parametrize("name", [name for name in PRESETS if timm.is_model(name)])
def test_a_name_of_timm_s_has_timm_s_parameters(name):
    with torch.device("meta"):
        theirs, ours = timm.create_model(name), build(name)
    shapes = [(key, tensor.shape) for key, tensor in theirs.state_dict().items()]
    assert sorted((key, tensor.shape) for key, tensor in ours.state_dict().items()) == sorted(
        shapes
    )


def test_flops_equal_the_formula():
    """N·(8 + 4r)·D² + 4·N²·D a block, 2·P·(3·16²)·D for the patches and 2·D·C for the head."""
    tokens, width, depth = 197, 192, 12
    blocks = depth * (tokens * 24 * width**2 + 4 * tokens**2 * width)
    assert (
        compute_flops(PRESETS["vit_tiny_patch16_224"])
        == blocks + 2 * 196 * 768 * width + 2 * width * 1000
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "img_size": (32, 48),
            "patch_size": (4, 8),
            "mlp": "swiglu",
            "mlp_ratio": 3.0,
        },
        {
            "stem": "conv",
            "patch_size": (8, 4),
            "reg_tokens": 2,
            "qk_norm": True,
            "init_values": 0.1,
        },
        {"stem": "conv_pool", "patch_size": 8, "global_pool": "avg", "pos_embed": "sincos"},
        {
            "stem": "conv_pool",
            "patch_size": (2, 4),
            "img_size": (24, 32),
            "global_pool": "avg",
            "num_classes": 0,
        },
        {
            "stem": "conv_pool_residual",
            "global_pool": "avg",
            "class_token": True,
        },
        {"mlp": "relu2"},
    ],
)
@pytest.mark.parametrize("backend", ["explicit", "fused"])
def test_flops_equal_what_torch_counts(changes, backend):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if backend == "fused" and kernel not in flop_registry:
        pytest.skip("an older torch counts nothing of the fused attention")
    base = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 64,
        "depth": 3,
        "num_heads": 2,
        "num_classes": 10,
    }
    model = VisionTransformer(**(base | changes), attention_backend=backend).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, *model.patch_embed.img_size))
    assert compute_flops(model.architecture) == counter.get_total_flops() > 0


def test_flops_of_a_swiglu_and_of_a_conv_stem_are_counted():
    base = {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 64,
        "depth": 1,
        "num_heads": 1,
        "num_classes": 10,
    }
    gelu = compute_flops(base | {"mlp_ratio": 4.0})
    assert compute_flops(base | {"mlp_ratio": 4.0, "mlp": "swiglu"}) == gelu - 2 * 65 * 64 * 128
    # 3→32 at 16×16, 32→64 and the 1×1 map at 8×8, in place of 48→64 at 8×8
    stem = 2 * (256 * 27 * 32 + 64 * 288 * 64 + 64 * 64 * 64) - 2 * 64 * 48 * 64
    assert compute_flops(base | {"stem": "conv", "mlp_ratio": 4.0}) == gelu + stem


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_receives_a_gradient(name):
    """On a grid of 2×3 patches and three blocks, which is all that differs from the preset
    itself."""
    torch.manual_seed(0)
    side = PRESETS[name]["patch_size"]
    wide = PRESETS[name]["embed_dim"] >= 768
    model = build(name, img_size=(2 * side, 3 * side), depth=1 if wide else 3)
    model(torch.randn(2, 3, 2 * side, 3 * side)).square().sum().backward()
    idle = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert idle == []
