"""`vit export`: other programs compute the same logits."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch

from vit.bundle import load_bundle, save_bundle
from vit.cli.main import main
from vit.data.images import Preprocess
from vit.model.vision_transformer import VisionTransformer

NAMES = ("ant", "bee", "cow")
FOR_TIMM: list[dict[str, Any]] = [
    {},
    {"global_pool": "avg", "pos_embed": "sincos"},
    {"global_pool": "max", "reg_tokens": 2, "qk_norm": True, "class_token": True},
    {"mlp": "swiglu", "init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True, "mlp_ratio": 3.0},
    {"distilled": True, "qkv_bias": False},
    {"pos_embed": "none", "global_pool": "avg", "fc_norm": False, "mlp_ratio": 2.55},
]


def save(tmp_path: Path, **options: Any) -> tuple[str, VisionTransformer]:
    """A model file whose every parameter matters: none is zero, one or tiny."""
    torch.manual_seed(0)
    model = VisionTransformer((8, 16), 4, 3, len(NAMES), 32, depth=2, num_heads=4, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    path = tmp_path / "model.safetensors"
    preprocess = Preprocess(
        image_size=(8, 16),
        crop_pct=0.5,
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
        interpolation="bilinear",
    )
    save_bundle(path, model, preprocess=preprocess, class_names=NAMES, config={}, data={})
    return str(path), model


def export(model: str, to: str, output: Path, *more: str) -> None:
    try:
        main(["export", model, "--to", to, "--output", str(output), *more])
    except SystemExit as stop:
        if stop.code:
            raise


@pytest.mark.parametrize("options", FOR_TIMM)
def test_timm_opens_the_folder_and_computes_equal_logits(options: dict[str, Any], tmp_path: Path) -> None:
    path, model = save(tmp_path, **options)
    export(path, "timm", tmp_path / "out")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(3, 3, 8, 16)
    torch.testing.assert_close(theirs(images), model(images), atol=1e-5, rtol=0)
    config = timm.data.resolve_model_data_config(theirs)
    assert (config["input_size"], config["crop_pct"]) == ((3, 8, 16), 0.5)
    assert [*config["mean"], *config["std"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert config["interpolation"] == "bilinear"
    assert tuple(theirs.pretrained_cfg["label_names"]) == NAMES


def test_what_was_exported_to_timm_comes_back(tmp_path: Path) -> None:
    path, model = save(tmp_path)
    export(path, "timm", tmp_path / "out")
    bundle = load_bundle(f"timm:local-dir:{tmp_path / 'out'}")
    images = torch.randn(3, 3, 8, 16)
    torch.testing.assert_close(bundle.model(images), model(images), atol=1e-5, rtol=0)
    assert bundle.class_names == NAMES
    assert bundle.preprocess == load_bundle(path).preprocess


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stem": "conv"}, "stem 'conv'"),
        ({"mlp": "relu2"}, "mlp 'relu2'"),
        ({"global_pool": "attention"}, "global_pool 'attention'"),
        ({"distilled": True, "reg_tokens": 1}, "distilled with registers"),
    ],
)
def test_what_timm_has_not_is_named(
    options: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = save(tmp_path, **options)
    with pytest.raises(SystemExit) as stop:
        main(["export", path, "--to", "timm", "--output", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_onnx_runs_any_number_of_images_with_equal_logits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, model = save(tmp_path, stem="conv", global_pool="attention", mlp="relu2")
    export(path, "onnx", tmp_path / "out")
    printed = capfd.readouterr()
    assert printed.err == ""
    assert len(printed.out.splitlines()) == 1
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 8, 16)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        np.testing.assert_allclose(logits, model(images).detach().numpy(), atol=1e-5)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["class_names"] == list(NAMES)
    assert Preprocess.from_dict(facts["preprocess"]) == load_bundle(path).preprocess


def test_torch_export_runs_any_number_of_images_with_equal_logits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, model = save(tmp_path, distilled=True)
    export(path, "torch-export", tmp_path / "out")
    assert capfd.readouterr().err == ""
    module = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 8, 16)
        torch.testing.assert_close(module(images), model(images), atol=1e-5, rtol=0)


def test_onnx_without_its_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = save(tmp_path)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(SystemExit) as stop:
        main(["export", path, "--to", "onnx", "--output", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "vit-pipeline[onnx]" in capsys.readouterr().err


def test_an_earlier_export_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path, _ = save(tmp_path)
    export(path, "timm", tmp_path / "out")
    with pytest.raises(SystemExit) as stop:
        main(["export", path, "--to", "timm", "--output", str(tmp_path / "out")])
    assert stop.value.code == 2
    export(path, "timm", tmp_path / "out", "--overwrite")
