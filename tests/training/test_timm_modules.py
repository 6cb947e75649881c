"""Models of timm that ours can't compute are trained as timm's own modules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

import vit
from tests.training.test_user_objects import NAMES, Arrays, StopAfter, arrays, same

__all__ = ["arrays"]  # a fixture

SIZES = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "vit_small_patch16_dinov3": SIZES,
    "eva02_tiny_patch14_224": SIZES,
    "convnext_atto": {"depths": [1, 1, 1, 1], "dims": [8, 8, 16, 16]},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_module_of_timm_trains_resumes_and_opens_by_its_file_alone(
    name: str, arrays: Arrays, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    size = {"input_size": (3, 32, 32)}
    module = timm.create_model(name, pretrained_cfg_overlay=size, **MODELS[name])
    timm.models.save_for_hf(module, tmp_path, model_args=MODELS[name])

    def train(run: str, **options: Any) -> Any:
        keys = {"data.image_size": None, "data.validation_fraction": 0, "train.epochs": 2}
        options = {"overrides": keys | {"train.device": "cpu"}, **options}
        options |= {"dataset": arrays, "class_names": NAMES, "init": tmp_path}
        return vit.train("folder/finetune", output=tmp_path / run, **options)

    whole = train("whole")
    assert not same(whole, train("run", callbacks=[StopAfter(4)]))
    assert same(whole, train("run", resume=True))

    opened = vit.load_bundle(whole.model_path)
    assert (opened.class_names, opened.preprocess.image_size) == (NAMES, (32, 32))
    assert type(opened.model).__module__.startswith("timm.")
    answers = vit.predict(opened, list(arrays[0][:90:3])).predictions
    assert np.mean([answer.predicted == "red" for answer in answers]) > 0.5
    with pytest.raises(ValueError, match=r"model\.depth 3: the weights of --init have their own"):
        train("deep", overrides={"model.depth": 3})
    with pytest.raises(
        ValueError, match=r"model\.freeze=1 is for vit's own models, and \w+ is not one"
    ):
        train("frozen", overrides={"model.freeze": 1})


def test_a_published_file_of_dinov3_opens(tmp_path: Path) -> None:
    module = timm.create_model("vit_tiny_patch16_dinov3_qkvb").eval()
    published = {"mask_token": torch.zeros(1, 192), "rope_embed.periods": torch.zeros(16)}
    for name, value in module.state_dict().items():
        name = name.replace("gamma_1", "ls1.gamma").replace("gamma_2", "ls2.gamma")
        published[name.replace("reg_token", "storage_tokens")] = value
    for block in range(12):
        start = f"blocks.{block}.attn."
        query, last = (published.pop(f"{start}{part}_bias") for part in "qv")
        published[f"{start}qkv.bias"] = torch.cat([query, torch.zeros_like(query), last])
    torch.save(published, tmp_path / "dinov3.pth")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(vit.load_bundle(tmp_path / "dinov3.pth").model(images), module(images))
