"""Folders of Hugging Face as `--init` takes them: a ViT gives the logits of its library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from vit.model.modules import load_pretrained, load_timm

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}


def build(**values: Any) -> nn.Module:
    """Every weight matters, and activations are of the size that trained ones have."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **values))
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn_like(parameter) + (parameter.data == 1)
    return model.eval()


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_a_folder_of_hugging_face_computes_what_its_library_does(
    tmp_path: Path, qkv_bias: bool
) -> None:
    theirs = build(qkv_bias=qkv_bias)
    theirs.save_pretrained(tmp_path)
    ours = load_timm(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = theirs(images).logits
        # ViT has the epsilon 1e-12 in its norms, ours 1e-6 as it was trained with
        torch.testing.assert_close(ours(images), expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1

    model, preprocess = load_pretrained(tmp_path, num_classes=5)
    assert model.num_classes == 5
    assert preprocess is not None
    assert list(preprocess["mean"]) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("values", "image_size", "crop_pct"),
    [
        ({}, 32, None),
        ({"size": 32}, 32, None),
        ({"size": None, "crop_size": None}, 32, None),
        ({"size": {"height": 32, "width": 32}}, 32, None),
        ({"size": {"shortest_edge": 32}, "crop_size": 24, "do_center_crop": True}, 24, 0.75),
        ({"size": 32, "crop_size": {"height": 24, "width": 24}, "do_center_crop": True}, 24, 0.75),
        ({"size": 40, "crop_size": 24}, 32, None),
    ],
)
def test_sizes_are_read_in_every_published_form(
    tmp_path: Path, values: dict[str, Any], image_size: int, crop_pct: float | None
) -> None:
    """Older folders have numbers where newer ones have a dictionary."""
    build().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    model, preprocess = load_pretrained(tmp_path, num_classes=3)
    assert preprocess is not None
    assert preprocess["image_size"] == [image_size] * 2
    assert preprocess.get("crop_pct") == crop_pct
    assert model.patch_embed.img_size == (image_size, image_size)


def change_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "No such file"),
    "another model": (change_config(model_type="swin"), "holds a swin, .*take timm:NAME"),
    "activation": (change_config(hidden_act="relu"), "unknown hidden_act in .*'relu'"),
    "heads": (change_config(num_attention_heads="four"), "not supported between"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_folder_is_one_sentence(tmp_path: Path, what: str) -> None:
    spoil, message = SPOILT[what]
    build().save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises((ValueError, OSError), match=message) as error:
        load_pretrained(tmp_path, num_classes=3)
    assert len(str(error.value).splitlines()) == 1
