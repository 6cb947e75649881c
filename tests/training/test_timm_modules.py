"""Models of timm that ours can't compute are trained as timm's own modules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import vit
from tests.training.test_user_objects import NAMES, Arrays, StopAfter, arrays, same

__all__ = ["arrays"]  # a fixture

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DINOv3": ("vit_small_patch16_dinov3", SIZES),
    "EVA-02": ("eva02_tiny_patch14_224", SIZES),
    "ConvNeXt": ("convnext_atto", {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]}),
}


def save_folder(folder: Path, name: str, arguments: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    folder.mkdir()
    module = timm.create_model(name, num_classes=5, **arguments)
    save_file(module.state_dict(), folder / "model.safetensors")
    config = {"architecture": name, "model_args": arguments, "num_classes": 5}
    config["pretrained_cfg"] = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_of_timm_trains_resumes_and_opens_by_its_file_alone(
    kind: str, arrays: Arrays, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path / "weights", *KINDS[kind])

    def train(name: str, **options: Any) -> Any:
        keys = {"data.image_size": None, "data.validation_fraction": 0, "train.epochs": 2}
        keys |= {"train.device": "cpu"}
        options |= {"dataset": arrays, "class_names": NAMES, "overrides": keys}
        return vit.train("folder/finetune", output=tmp_path / name, init=folder, **options)

    whole = train("whole")
    assert not same(whole, train("run", callbacks=[StopAfter(4)]))
    assert same(whole, train("run", resume=True))

    opened = vit.load_bundle(whole.model_path)
    assert (opened.class_names, opened.preprocess.image_size) == (NAMES, (32, 32))
    assert type(opened.model).__module__.startswith("timm.")
    reds = list(arrays[0][:90:3])
    answers = vit.predict(opened, reds).predictions
    assert np.mean([answer.predicted == "red" for answer in answers]) > 0.5
    assert vit.embed(opened, reds).shape == (30, opened.model.num_features)


def test_blocks_of_a_module_of_timm_are_frozen(arrays: Arrays, tmp_path: Path) -> None:
    def train(kind: str, name: str, **keys: Any) -> Any:
        folder = save_folder(tmp_path / name, *KINDS[kind])
        sections = {
            "data": {"image_size": None},
            "model": {"init": str(folder), **keys},
            "train": {"max_steps": 2, "device": "cpu"},
        }
        return vit.train(sections, output=tmp_path / f"{name}-run", dataset=arrays)

    frozen = train("DINOv3", "dino", freeze=1)
    before = vit.load_bundle(tmp_path / "dino").model.state_dict()
    after = frozen.bundle.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "blocks.1.attn.proj.weight" in changed
    assert {name.split(".")[0] for name in changed} <= {"blocks", "norm", "fc_norm", "head"}
    assert not any(name.startswith("blocks.0.") for name in changed)
    with pytest.raises(ValueError, match="freeze 5: the model has 4 blocks"):
        train("ConvNeXt", "conv", freeze=5)
    with pytest.raises(ValueError, match=r"model\.depth 3: the weights of --init have their own"):
        train("DINOv3", "deep", depth=3)


def test_a_published_file_of_dinov3_opens(tmp_path: Path) -> None:
    module = timm.create_model("vit_tiny_patch16_dinov3_qkvb").eval()
    names = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma", "reg_token": "storage_tokens"}
    published = {"mask_token": torch.zeros(1, 192), "rope_embed.periods": torch.zeros(16)}
    for name, value in module.state_dict().items():
        for theirs, other in names.items():
            name = name.replace(theirs, other)
        published[name] = value
    for block in range(12):
        start = f"blocks.{block}.attn."
        query, last = (published.pop(f"{start}{part}_bias") for part in "qv")
        published[f"{start}qkv.bias"] = torch.cat([query, torch.zeros_like(query), last])
    torch.save(published, tmp_path / "dinov3_vitt16_pretrain.pth")
    opened = vit.load_bundle(tmp_path / "dinov3_vitt16_pretrain.pth")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(opened.model(images), module(images))
