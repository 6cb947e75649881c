"""What training relies on: the start, gradients, compilation, precision, memory, freezing, other weights."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from vit.model.attention import MultiHeadAttention
from vit.model.encoder import Mlp
from vit.model.presets import PRESETS
from vit.model.timm_weights import load_pretrained
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import load_state, read_weights

SMALL: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 4,
    "num_classes": 5,
    "embed_dim": 64,
    "depth": 2,
    "num_heads": 2,
}


def build(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**SMALL | options)


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_of_every_preset_receives_a_gradient(name: str) -> None:
    cut = {"depth": 2, "img_size": 2 * PRESETS[name]["patch_size"], "embed_dim": 96, "num_heads": 2}
    model = VisionTransformer(**PRESETS[name] | cut | {"num_classes": 3})
    model(torch.randn(2, 3, *model.patch_embed.img_size)).square().sum().backward()
    untouched = [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert untouched == []


@pytest.mark.parametrize(
    "options",
    [{}, {"pool": "attention", "stem": "conv", "pos_embed": "sincos"}, {"distilled": True, "mlp": "swiglu"}],
)
def test_compiles_without_a_graph_break(options: dict[str, Any]) -> None:
    script = f"""
import torch
from vit.model.vision_transformer import VisionTransformer
model, images = VisionTransformer(**{SMALL | options}), torch.randn(2, 3, 16, 16)
compiled = torch.compile(model, fullgraph=True, backend="eager")
torch.testing.assert_close(compiled(images), model(images), atol=1e-6, rtol=0)
"""  # in a process of its own: the checks of shapes that tests install can't be compiled
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("backend", ["fused", "explicit", "auto"])
def test_bfloat16_stays_close_to_float32(backend: str) -> None:
    model, images = build(attention_backend=backend).eval(), torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.normal_()
        exact = model(images)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model(images)
    assert rough.dtype == torch.bfloat16
    assert (rough - exact).norm() < 0.02 * exact.norm()


def test_activation_checkpointing_changes_no_number() -> None:
    images = torch.randn(4, 3, 16, 16)
    model = build(drop_path_rate=0.5)
    gradients = []
    for model.grad_checkpointing in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        model(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_weights_start_as_in_the_field() -> None:
    model = build(embed_dim=256, num_heads=4, reg_tokens=4, init_values=1e-5)
    for name, parameter in model.state_dict().items():
        if name.endswith(("qkv.weight", "proj.weight", "fc1.weight", "fc2.weight", "pos_embed")):
            std = (1 / 48) ** 0.5 if name.startswith("patch_embed") else 0.02
            assert parameter.mean().abs() < 0.1 * std, name
            assert parameter.std() == pytest.approx(std, rel=0.05), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        elif name.endswith("gamma"):
            assert (parameter == 1e-5).all(), name
        elif name.endswith("_token"):
            assert 0 < parameter.abs().max() < 1e-4, name
    assert model.head.weight.detach().std() == pytest.approx(0.02, rel=0.1)


def test_patches_of_unit_variance_become_tokens_of_unit_variance() -> None:
    for stem in ("patch", "conv"):
        model = build(embed_dim=256, num_heads=4, stem=stem)
        with torch.no_grad():
            tokens = model.patch_embed(torch.randn(64, 3, 16, 16))
        assert 0.5 < tokens.std() < 1.5, stem


def test_attention_is_handed_out_layer_by_layer_and_not_kept() -> None:
    import weakref

    model, kept = build(depth=4).eval(), []

    def watch(layer: int, weights: torch.Tensor) -> None:
        assert weights.shape == (2, 2, 17, 17)
        assert all(reference() is None for reference in kept[:layer])
        kept.append(weakref.ref(weights))

    with torch.no_grad():
        model(torch.randn(2, 3, 16, 16), watch)
    assert len(kept) == 4
    assert all(reference() is None for reference in kept)


def trained(model: VisionTransformer) -> set[str]:
    return {name.split(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_a_linear_probe_trains_the_head_alone() -> None:
    model = build(distilled=True)
    model.freeze("backbone")
    assert trained(model) == {"head", "head_dist"}


def test_freezing_blocks_freezes_what_comes_before_them() -> None:
    model = build(depth=3, reg_tokens=1)
    model.freeze(2)
    assert trained(model) == {"blocks", "norm", "head"}
    assert [any(p.requires_grad for p in block.parameters()) for block in model.blocks] == [
        False,
        False,
        True,
    ]
    with pytest.raises(ValueError, match="3 blocks"):
        model.freeze(4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_heads": 5}, "num_heads 5 does not divide embed_dim 64; try"),
        ({"img_size": 30}, "img_size 30 is not a multiple of patch_size 4; try 28 or 32"),
        ({"patch_size": 0}, "patch_size 0"),
        ({"pool": "mean"}, "unknown pool 'mean'; known: attention, avg, max, token"),
        ({"stem": "cnn"}, "unknown stem 'cnn'"),
        ({"pos_embed": "rope"}, "unknown pos_embed 'rope'"),
        ({"mlp": "gelo"}, "unknown mlp 'gelo'"),
        ({"reg_tokens": 9}, "reg_tokens 9 is not from 0 to 8"),
        ({"drop_path_rate": 1.0}, "drop_path_rate 1.0"),
        ({"class_token": False}, "class token"),
        ({"patch_size": 6, "img_size": 18, "stem": "conv"}, "powers of two"),
    ],
)
def test_a_mistake_is_answered_with_the_value_and_the_cure(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        build(**options)
    assert sentence in str(error.value)


def test_layers_refuse_unknown_kinds() -> None:
    with pytest.raises(ValueError, match="odd: 5"):
        Mlp(4, 5, activation="swiglu")
    with pytest.raises(ValueError, match="num_heads 0"):
        MultiHeadAttention(4, 0)


def test_weights_of_another_model_are_refused_with_what_would_fit() -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.device("meta"):
        state = VisionTransformer(**PRESETS["vit_tiny_patch16_224"]).state_dict()
    with pytest.raises(ValueError, match="does not fit") as error:
        load_state(model, state, origin="tiny.pth")
    message = str(error.value)
    assert "cls_token is [1, 1, 192] there and [1, 1, 64] in the model" in message
    assert "embed_dim=192" in message
    assert "vit_tiny_patch16_224" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = build().state_dict()
    state["norm.weight"][3] = torch.nan
    save_file(state, tmp_path / "broken.safetensors")
    with pytest.raises(ValueError, match=r"norm\.weight holds 1 NaN"):
        read_weights(tmp_path / "broken.safetensors")


def test_a_file_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "a.pth"):
        (tmp_path / name).write_bytes(b"no weights at all")
        with pytest.raises(ValueError, match="holds no weights"):
            read_weights(tmp_path / name)


@pytest.mark.parametrize("num_classes", [1000, 7])
def test_fine_tuning_starts_from_the_weights_with_a_new_head_and_size(
    num_classes: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    model, preprocess = load_pretrained(
        tmp_path / "weights.safetensors", img_size=(32, 96), num_classes=num_classes, drop_path_rate=0.1
    )
    assert preprocess is None
    assert model.grid_size == (2, 6)
    assert model.architecture["drop_path_rate"] == 0.1
    assert model(torch.randn(2, 3, 32, 96)).shape == (2, num_classes)
    theirs.set_input_size(img_size=(32, 96))
    ours, expected = model.state_dict(), theirs.state_dict()
    differing = [name for name in expected if not torch.equal(ours[name], expected[name])]
    assert differing == ([] if num_classes == 1000 else ["head.weight", "head.bias"]), differing
    VisionTransformer(**model.architecture).load_state_dict(ours, strict=True)
