"""Which parameter gets which settings."""

import pytest
from torch import nn

from vit.model.stem import STEMS
from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import parameter_groups


def build_model(**arguments):
    return VisionTransformer(16, 4, num_classes=5, embed_dim=24, depth=3, num_heads=2, **arguments)


def settings(model: nn.Module, key: str, **arguments) -> dict[str, float]:
    """Parameter name → the value of its group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, **arguments)
    return {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("stem", ["patch", "conv"])
def test_matrices_and_kernels_decay_and_nothing_else(stem):
    model = build_model(stem=stem, init_values=0.1, qk_norm=True)
    decay = settings(model, "weight_decay", lr=1.0, weight_decay=0.05)
    expected = {
        name
        for name, _ in model.named_parameters()
        if name.endswith(("qkv.weight", "attn.proj.weight", "fc1.weight", "fc2.weight"))
        or name == "head.weight"
        or (name.startswith("patch_embed") and name.endswith("weight"))
    }
    assert {name for name, value in decay.items() if value == 0.05} == expected
    assert {value for name, value in decay.items() if name not in expected} == {0.0}


def test_learning_rate_falls_by_layer_decay_from_head_to_embedding():
    rates = settings(build_model(), "lr", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    assert rates["head.weight"] == rates["norm.bias"] == 1.0
    assert rates["blocks.2.mlp.fc1.weight"] == 0.5
    assert rates["blocks.1.norm1.weight"] == 0.25
    assert rates["blocks.0.attn.qkv.bias"] == 0.125
    assert rates["patch_embed.proj.weight"] == rates["cls_token"] == rates["pos_embed"] == 0.0625


@pytest.mark.parametrize("stem", STEMS)
def test_muon_takes_hidden_matrices_and_kernels_and_splits_packed_projections_in_three(stem):
    model = build_model(stem=stem)
    num_matrices = settings(model, "num_matrices", lr=1.0, weight_decay=0.05, muon_lr=0.02)
    reads_pixels = "patch_embed.proj.weight" if stem == "patch" else "patch_embed.stem.0.weight"
    for name, parameter in model.named_parameters():
        inside = name.startswith("blocks") and parameter.ndim == 2
        kernel = parameter.ndim == 4 and name != reads_pixels
        assert num_matrices[name] == (
            3 if name.endswith("qkv.weight") else 1 if inside or kernel else 0
        ), name
    kernels = {"patch": 1, "conv": 3, "conv_pool": 2, "conv_pool_residual": 3, "conv_residual": 6}
    assert sum(parameter.ndim == 4 for parameter in model.parameters()) == kernels[stem]
