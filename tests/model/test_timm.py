"""timm's and torchvision's models, their weights in ours: the same logits and the same attention."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from timm import layers
from torch import nn

import vit
from vit.model.presets import PRESETS, compute_flops
from vit.model.timm_weights import describe_timm, load_timm
from vit.model.vision_transformer import VisionTransformer

COSTS = {  # parameters; floating-point operations of one image, twice the multiply-adds
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
IN_TIMM = [name for name in PRESETS if timm.is_model(name)]


def randomise(module: nn.Module) -> nn.Module:
    """Weights of which none is zero, one or tiny, so that whatever is left out shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_scale = name.endswith("gamma") or (".norm" in name and name.endswith("weight"))
            noise = torch.randn_like(parameter) * (0.05 if parameter.ndim > 1 else 0.2)
            parameter.copy_(noise + 1 if is_scale else noise)
    return module.eval()


def create(name: str, *, size: int | tuple[int, int] | None = None, **arguments: Any) -> nn.Module:
    """timm's model of two blocks, on images of 4 × 4 patches unless told otherwise."""
    size = size or 4 * int(PRESETS[name]["patch_size"])
    return randomise(timm.create_model(name, depth=2, img_size=size, **arguments))


def draw_images(module: Any, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, *module.patch_embed.img_size)


def assert_same_logits(theirs: nn.Module, ours: VisionTransformer) -> None:
    images = draw_images(ours)
    with torch.no_grad():
        expected = theirs(images)
        assert expected.std() > 0.1
        torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=1e-5)


def test_every_preset_is_timms_or_for_small_images() -> None:
    assert COSTS.keys() == PRESETS.keys()
    assert {name for name in PRESETS if name not in IN_TIMM} == {
        f"vit_{size}_patch4_32" for size in ("nano", "micro", "mini", "tiny", "small")
    }


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_and_flops_of_every_preset(name: str) -> None:
    with torch.device("meta"):
        model = VisionTransformer(**PRESETS[name])
    assert (
        sum(parameter.numel() for parameter in model.parameters()),
        compute_flops(PRESETS[name]),
    ) == COSTS[name]


@pytest.mark.parametrize("name", IN_TIMM)
def test_presets_have_timms_parameters_by_name_and_shape(name: str) -> None:
    with torch.device("meta"):
        theirs, ours = timm.create_model(name), VisionTransformer(**PRESETS[name])
    shapes = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert {key: tensor.shape for key, tensor in ours.state_dict().items()} == shapes
    assert sum(parameter.numel() for parameter in theirs.parameters()) == COSTS[name][0]
    described = VisionTransformer(**PRESETS[name] | {"depth": 1}).architecture | {
        "depth": PRESETS[name]["depth"]
    }
    for key, value in describe_timm(theirs).items():
        assert described[key] == (pytest.approx(value, rel=1e-3) if key == "mlp_ratio" else value), key


@pytest.mark.parametrize("name", IN_TIMM)
def test_logits_equal_timms_in_every_preset(name: str) -> None:
    theirs = create(name)
    cut = {"depth": 2, "img_size": theirs.patch_embed.img_size}
    ours = VisionTransformer(**PRESETS[name] | cut).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same_logits(theirs, ours)
    assert_same_logits(theirs, load_timm(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IN_TIMM if "giant" not in name])
def test_logits_equal_timms_at_full_size(name: str) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model(name).eval()
    assert_same_logits(theirs, load_timm(theirs))


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "deit3_small_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "vit_small_patch14_reg4_dinov2",
    ],
)
@pytest.mark.parametrize("grid", [(6, 6), (3, 5), (2, 9)])
def test_logits_equal_timms_at_another_size(name: str, grid: tuple[int, int]) -> None:
    theirs = create(name)
    ours = load_timm(theirs)
    patch = int(PRESETS[name]["patch_size"])
    size = (grid[0] * patch, grid[1] * patch)
    resampled = layers.resample_abs_pos_embed(
        theirs.pos_embed,
        list(grid),
        num_prefix_tokens=0 if theirs.no_embed_class else theirs.num_prefix_tokens,
    )
    theirs.patch_embed.set_input_size(size)
    theirs.pos_embed = nn.Parameter(resampled.detach())
    ours.set_input_size(size)
    assert ours.grid_size == grid
    assert ours.architecture["img_size"] == size
    assert_same_logits(theirs, ours)


def test_logits_equal_timms_after_both_set_their_input_size() -> None:
    theirs = create("vit_tiny_patch16_224")
    ours = load_timm(theirs)
    theirs.set_input_size(img_size=(48, 96))
    ours.set_input_size((48, 96))
    assert_same_logits(theirs, ours)


@pytest.mark.parametrize(
    "arguments",
    [
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "max"},
        {"qk_norm": True, "qkv_bias": False},
        {"reg_tokens": 3, "init_values": 0.1, "fc_norm": True},
        {"pos_embed": "none", "num_classes": 0},
        {"patch_size": (8, 16), "in_chans": 3},
    ],
)
def test_timms_options_are_recognised(arguments: dict[str, Any]) -> None:
    theirs = create("vit_tiny_patch16_224", size=(32, 64), **arguments)
    assert_same_logits(theirs, load_timm(theirs))


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2"]
)
def test_attention_of_each_layer_equals_timms_unfused(name: str) -> None:
    theirs: Any = create(name)
    ours = load_timm(theirs)
    seen: list[torch.Tensor] = []
    for block in theirs.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, __, weights: seen.append(weights))
    images = draw_images(theirs)
    with torch.no_grad():
        theirs(images)
        _, attentions = ours.forward_with_attention(images)
    assert len(attentions) == len(seen) == 2
    for weights, expected in zip(attentions, seen, strict=True):
        assert expected.std() > 1e-3
        torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)


def create_torchvision() -> nn.Module:
    return randomise(
        torchvision.models.VisionTransformer(
            image_size=64, patch_size=16, num_layers=2, num_heads=2, hidden_dim=128, mlp_dim=512
        )
    )


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_torchvisions_weights_convert(suffix: str, tmp_path: Path) -> None:
    theirs, path = create_torchvision(), tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save(theirs.state_dict(), path)
    else:
        save_file(theirs.state_dict(), path)
    assert_same_logits(theirs, vit.load_timm(path))
    assert_same_logits(theirs, vit.load_timm(str(path)))


@pytest.mark.slow
def test_torchvisions_vit_b_16_converts(tmp_path: Path) -> None:
    theirs = torchvision.models.vit_b_16().eval()
    nn.init.normal_(theirs.heads.head.weight, std=0.02)
    torch.save(theirs.state_dict(), tmp_path / "vit_b_16.pth")
    assert_same_logits(theirs, load_timm(tmp_path / "vit_b_16.pth"))


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2"]
)
def test_a_file_of_timms_weights_tells_the_architecture(name: str, tmp_path: Path) -> None:
    theirs = create(name)
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    assert_same_logits(theirs, vit.load_timm(tmp_path / "model.safetensors"))


def test_a_folder_of_timm_loads(tmp_path: Path) -> None:
    theirs = create("vit_tiny_patch16_224", num_classes=7)
    timm.models.save_for_hf(
        theirs, tmp_path, model_args={"depth": 2, "img_size": 64, "num_classes": 7}, safe_serialization=True
    )
    assert_same_logits(theirs, vit.load_timm(tmp_path))


def test_a_name_loads_and_a_misspelt_one_is_answered_with_near_ones() -> None:
    ours = vit.load_timm("vit_tiny_patch16_224", pretrained=False)
    assert ours.architecture == VisionTransformer(**PRESETS["vit_tiny_patch16_224"]).architecture
    with pytest.raises(ValueError, match="vit_tiny_patch16_224"):
        vit.load_timm("vit_tiny_patch16_225", pretrained=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet18", "ResNet"),
        ("vit_base_patch16_clip_224", "a norm before the blocks"),
        ("vit_medium_patch16_gap_256", None),
        ("vit_base_patch16_siglip_224", "pooling 'map'"),
        ("beit_base_patch16_224", "Beit"),
    ],
)
def test_models_that_compute_something_else_are_refused(name: str, reason: str | None) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(name)
    if reason is None:
        describe_timm(theirs)
        return
    with pytest.raises(ValueError, match=reason):
        describe_timm(theirs)
