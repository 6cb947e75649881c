"""Every preset: its size and work pinned, its options alive."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from vit.model.presets import PRESETS, compute_flops
from vit.model.vision_transformer import VisionTransformer

# parameters, and floating-point operations of one image's forward pass (two a multiply-add)
PINNED = {
    "vit_tiny_patch16_224": (5_717_416, 2_507_366_400),
    "vit_tiny_patch16_384": (5_790_376, 9_364_439_040),
    "vit_small_patch32_224": (22_878_952, 2_285_819_904),
    "vit_small_patch32_384": (22_915_432, 6_885_801_984),
    "vit_small_patch16_224": (22_050_664, 9_197_764_608),
    "vit_small_patch16_384": (22_196_584, 30_980_702_208),
    "vit_base_patch32_224": (88_224_232, 8_818_372_608),
    "vit_base_patch32_384": (88_297_192, 26_087_129_088),
    "vit_base_patch16_224": (86_567_656, 35_127_656_448),
    "vit_base_patch16_384": (86_859_496, 110_968_700_928),
    "vit_base_patch8_224": (86_576_872, 156_296_675_328),
    "vit_large_patch32_384": (306_632_680, 90_551_926_784),
    "vit_large_patch16_224": (304_326_632, 123_109_425_152),
    "vit_large_patch16_384": (304_715_752, 382_132_600_832),
    "vit_large_patch14_224": (304_203_752, 162_026_012_672),
    "deit_tiny_patch16_224": (5_717_416, 2_507_366_400),
    "deit_tiny_distilled_patch16_224": (5_910_800, 2_522_007_552),
    "deit_small_patch16_224": (22_050_664, 9_197_764_608),
    "deit_small_distilled_patch16_224": (22_436_432, 9_248_280_576),
    "deit_base_patch16_224": (86_567_656, 35_127_656_448),
    "deit_base_distilled_patch16_224": (87_338_192, 35_313_623_040),
    "deit_base_patch16_384": (86_859_496, 110_968_700_928),
    "deit_base_distilled_patch16_384": (87_630_032, 111_182_684_160),
    "deit3_small_patch16_224": (22_059_496, 9_197_764_608),
    "deit3_small_patch16_384": (22_205_416, 30_980_702_208),
    "deit3_medium_patch16_224": (38_849_512, 15_981_936_640),
    "deit3_base_patch16_224": (86_585_320, 35_127_656_448),
    "deit3_base_patch16_384": (86_877_160, 110_968_700_928),
    "deit3_large_patch16_224": (304_374_760, 123_109_425_152),
    "deit3_large_patch16_384": (304_763_880, 382_132_600_832),
    "vit_small_patch14_dinov2": (22_056_192, 93_393_478_656),
    "vit_small_patch14_reg4_dinov2": (22_057_344, 93_765_657_600),
    "vit_base_patch14_dinov2": (86_579_712, 303_147_436_032),
    "vit_base_patch14_reg4_dinov2": (86_582_016, 304_231_532_544),
    "vit_large_patch14_dinov2": (304_367_616, 1_013_607_653_376),
    "vit_large_patch14_reg4_dinov2": (304_370_688, 1_017_102_557_184),
    "vit_giant_patch14_dinov2": (1_136_479_232, 3_566_685_917_184),
    "vit_giant_patch14_reg4_dinov2": (1_136_483_840, 3_578_443_075_584),
    "vit_nano_patch4_32": (545_930, 76_286_464),
    "vit_micro_patch4_32": (1_806_154, 246_550_272),
    "vit_mini_patch4_32": (3_721_738, 500_700_160),
    "vit_tiny_patch4_32": (5_362_378, 718_409_472),
    "vit_small_patch4_32": (21_341_578, 2_795_773_440),
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
            "global_pool": "attention",
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
            "global_pool": "max",
            "num_classes": 0,
        },
        {
            "stem": "conv_pool_residual",
            "global_pool": "avg",
            "class_token": True,
            "pos_embed": "none",
        },
        {"distilled": True, "mlp": "relu2", "no_embed_class": True},
    ],
)
@pytest.mark.parametrize("backend", ["explicit", "fused"])
def test_flops_equal_what_torch_counts(changes, backend):
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
