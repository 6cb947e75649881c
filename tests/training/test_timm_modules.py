"""Models of timm that ours can't compute are trained as timm's own modules."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import vit
from tests.training.test_user_objects import StopAfter, same

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


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise that is brighter in the channel of its class."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(60):
        pixels = random.integers(0, 120, (32, 32, 3), dtype=np.uint8)
        pixels[:, :, number % 3] += 100
        path = folder / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_of_timm_trains_resumes_and_opens_by_its_file_alone(
    kind: str, photos: Path, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path / "weights", *KINDS[kind])

    def train(name: str, **options: Any) -> Any:
        keys = {"data.name": "folder", "data.root": str(photos), "data.image_size": None}
        keys |= {"data.group_duplicates": False, "train.epochs": 2, "train.select_by": "macro_f1"}
        keys |= {"train.device": "cpu", "train.batch_size": 16, "data.validation_fraction": 0}
        output = tmp_path / name
        return vit.train("folder/finetune", output=output, init=folder, overrides=keys, **options)

    whole = train("whole")
    stopped = train("run", callbacks=[StopAfter(3)])
    assert not same(whole, stopped)
    resumed = train("run", resume=True)
    assert same(whole, resumed)
    assert resumed.model_path.read_bytes() == whole.model_path.read_bytes()

    opened = vit.load_bundle(whole.model_path)
    assert (opened.class_names, opened.preprocess.image_size) == (("a", "b", "c"), (32, 32))
    assert type(opened.model).__module__.startswith("timm.")
    assert vit.predict(opened, photos / "b").predictions[0].classes[0].name == "b"
    assert vit.embed(opened, photos / "b").shape == (20, opened.model.num_features)


def test_blocks_of_a_module_of_timm_are_frozen(photos: Path, tmp_path: Path) -> None:
    def train(kind: str, output: str, freeze: int | str) -> Any:
        folder = save_folder(tmp_path / output, *KINDS[kind])
        keys = {"model.freeze": freeze, "model.probe": False, "train.max_steps": 2}
        keys |= {"train.patch_drop_rates": None, "train.device": "cpu"}
        return vit.train(photos, init=folder, output=tmp_path / f"{output}-run", overrides=keys)

    frozen = train("DINOv3", "dino", 1)
    before = vit.load_bundle(tmp_path / "dino").model.state_dict()
    after = frozen.bundle.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in changed if name.startswith("blocks.0.")} == set()
    assert "blocks.1.attn.proj.weight" in changed
    assert not {"cls_token", "patch_embed.proj.weight"} & changed
    with pytest.raises(ValueError, match=r"freeze 1: ConvNeXt has 0 blocks in a row"):
        train("ConvNeXt", "conv", 1)
    with pytest.raises(ValueError, match=r"model\.depth 3: the weights of --init have their own"):
        vit.train(
            photos, init=tmp_path / "dino", output=tmp_path / "x", overrides=["model.depth=3"]
        )


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
