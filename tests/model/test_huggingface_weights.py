"""Weights of Hugging Face in every form that `--init` takes: each gives the logits or features of its
library."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from vit.model.modules import load_pretrained, load_timm

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def randomise(model: nn.Module) -> Any:
    """Every weight matters, and activations are of the size that trained ones have."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn_like(parameter) + (parameter.data == 1)
    return model.eval()


def build(name: str, config: str, **values: Any) -> Any:
    options = getattr(transformers, config)(**SIZES, **values)
    return randomise(getattr(transformers, name)(options))


FORMS: dict[str, Callable[[], Any]] = {
    "vit": lambda: build("ViTForImageClassification", "ViTConfig", intermediate_size=256, num_labels=3),
    "vit without biases": lambda: build(
        "ViTForImageClassification", "ViTConfig", intermediate_size=256, num_labels=3, qkv_bias=False
    ),
    "dinov2": lambda: build("Dinov2Model", "Dinov2Config"),
    "dinov2 swiglu": lambda: build("Dinov2Model", "Dinov2Config", use_swiglu_ffn=True),
    "dinov2 with registers": lambda: build("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
    "dinov2 with a classifier": lambda: build("Dinov2ForImageClassification", "Dinov2Config", num_labels=3),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("form", FORMS)
def test_a_folder_of_hugging_face_computes_what_its_library_does(
    tmp_path: Path, form: str, suffix: str
) -> None:
    theirs = FORMS[form]()
    theirs.save_pretrained(tmp_path)
    if suffix == "bin":
        file = tmp_path / "model.safetensors"
        torch.save(load_file(file), tmp_path / "pytorch_model.bin")
        file.unlink()
    ours = load_timm(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        if form.startswith("dinov2"):
            base = getattr(theirs, theirs.base_model_prefix, theirs)
            expected = base(images).last_hidden_state[:, 0]
            actual = ours.forward_features(images)[:, 0]
        else:
            expected = theirs(images).logits
            actual = ours(images)
    # ViT and DeiT have the epsilon 1e-12 in their norms, ours 1e-6 as they were trained with
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1

    model, preprocess = load_pretrained(tmp_path, num_classes=5)
    assert model.num_classes == 5
    assert preprocess is not None
    assert list(preprocess["mean"]) == [0.5, 0.5, 0.5]


def test_the_preprocessing_is_read_and_positions_are_resampled_to_its_size(tmp_path: Path) -> None:
    FORMS["dinov2 with registers"]().save_pretrained(tmp_path)
    processor = transformers.BitImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 24, "width": 24}
    )
    processor.save_pretrained(tmp_path)
    model, preprocess = load_pretrained(tmp_path, num_classes=3)
    assert preprocess == {
        "image_size": [24, 24],
        "crop_pct": 0.75,
        "mean": pytest.approx([0.48145466, 0.4578275, 0.40821073]),
        "std": pytest.approx([0.26862954, 0.26130258, 0.27577711]),
        "interpolation": "bicubic",
    }
    assert model.grid_size == (3, 3)
    assert model.pos_embed.shape == (1, 9, 128)


@pytest.mark.parametrize(
    ("values", "image_size", "crop_pct"),
    [
        ({}, 32, None),
        ({"size": 32}, 32, None),
        ({"size": None, "crop_size": None}, 32, None),
        ({"size": {"height": 32, "width": 32}}, 32, None),
        ({"size": {"shortest_edge": 32}, "crop_size": 24, "do_center_crop": True}, 24, 0.75),
        ({"size": 32, "crop_size": 24, "do_center_crop": True}, 24, 0.75),
        ({"size": 32, "crop_size": {"height": 24, "width": 24}, "do_center_crop": True}, 24, 0.75),
        ({"crop_size": 24, "do_center_crop": True}, 24, None),
        ({"size": 40, "crop_size": 24, "do_center_crop": False}, 32, None),
        ({"size": 40, "crop_size": 24}, 32, None),
    ],
)
def test_sizes_are_read_in_every_published_form(
    tmp_path: Path, values: dict[str, Any], image_size: int, crop_pct: float | None
) -> None:
    """Older folders have numbers where newer ones have a dictionary."""
    FORMS["vit"]().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    model, preprocess = load_pretrained(tmp_path, num_classes=3)
    assert preprocess is not None
    assert preprocess["image_size"] == [image_size] * 2
    assert preprocess.get("crop_pct") == crop_pct
    assert model.patch_embed.img_size == (image_size, image_size)


@pytest.mark.parametrize("size", ["large", 0, {"height": 2}, {"shortest_edge": -1}, [1, 2, 3]])
def test_a_size_that_is_none_is_one_sentence(tmp_path: Path, size: object) -> None:
    FORMS["vit"]().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    with pytest.raises(
        ValueError, match=r"preprocessor_config\.json: size .* is neither a positive"
    ):
        load_timm(tmp_path)


# --- what is refused
# ------------------------------------------------------------------------------------------


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def spoil(folder: Path, what: str) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    if what == "shape":
        name = next(name for name in weights if name.endswith("intermediate.dense.bias"))
        weights[name] = weights[name][:-1].clone()
    elif what == "NaN":
        weights["vit.layernorm.weight"][3] = torch.nan
    elif what == "no weights":
        file.unlink()
        return
    elif what in ("pickle", "damaged"):
        file.unlink()
        content: Any = weights | {"more": Malicious(folder / "executed")}
        if what == "pickle":
            torch.save(content, folder / "pytorch_model.bin")
        else:
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content)[:-100])
        return
    elif what in ("swin", "relu", "heads"):
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "swin": {"model_type": "swin"},
            "relu": {"hidden_act": "relu"},
            "heads": {"num_attention_heads": "four"},
        }[what]
        (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, file)


SPOILT = {
    "shape": "does not fit this model: blocks.0.mlp.fc1.bias is",
    "NaN": "holds 1 NaN or infinite values",
    "no weights": "holds none of model.safetensors, pytorch_model.bin",
    "pickle": "no weights that can be read",
    "damaged": "no weights that can be read",
    "swin": "unknown model_type in .*'swin'; known: dinov2",
    "relu": "unknown hidden_act in .*'relu'; known: gelu",
    "heads": "num_attention_heads is 'four', not a positive number",
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_folder_is_one_sentence_and_nothing_runs(tmp_path: Path, what: str) -> None:
    FORMS["vit"]().save_pretrained(tmp_path)
    spoil(tmp_path, what)
    with pytest.raises((ValueError, OSError), match=SPOILT[what]) as error:
        load_pretrained(tmp_path, num_classes=3)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "executed").exists()
