"""Model files: self-sufficient, whole, without pickle, the same bytes for the same model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vit
from vit.bundle import Bundle, load_bundle, open_model, require_classifier
from vit.data.preprocess import Preprocess
from vit.model.model_file import Likeness, read_model_file, write_model_file
from vit.model.vision_transformer import VisionTransformer


def make_model() -> VisionTransformer:
    torch.manual_seed(1)
    return VisionTransformer(
        img_size=(8, 16),
        patch_size=4,
        num_classes=3,
        embed_dim=16,
        depth=2,
        num_heads=2,
        reg_tokens=1,
        global_pool="avg",
    ).eval()


def save(path: Path, model: VisionTransformer, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "preprocess": Preprocess(
            image_size=(8, 16), crop_pct=0.5, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)
        ),
        "class_names": ("ant", "bee", "cow"),
        "config": {"train": {"epochs": 3}},
        "data": {"name": "folder", "fingerprint": "f" * 64},
        "training_hashes": (
            np.array([1, 2**64 - 1], dtype=np.uint64),
            np.array([3, 4], dtype=np.uint64),
        ),
    }
    Bundle(model=model, name="", sha256="", **(arguments | changes)).save(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors", make_model())


def test_a_bundle_needs_nothing_else(path: Path) -> None:
    bundle = load_bundle(path)
    images = torch.randn(2, 3, 8, 16)
    assert torch.equal(bundle.model(images), make_model()(images))
    assert not bundle.model.training
    assert bundle.class_names == ("ant", "bee", "cow")
    assert bundle.preprocess.image_size == (8, 16)
    assert bundle.preprocess.mean == (0.1, 0.2, 0.3)
    assert bundle.config == {"train": {"epochs": 3}}
    assert bundle.data["fingerprint"] == "f" * 64
    versions = bundle.metadata["versions"]
    assert versions["vit"] == vit.__version__
    assert {"python", "torch", "torchvision", "timm", "numpy", "safetensors"} < versions.keys()
    assert bundle.training_hashes is not None
    assert bundle.training_hashes[0].tolist() == [1, 2**64 - 1]


def test_equal_models_give_equal_bytes(path: Path) -> None:
    assert save(path.with_name("again"), make_model()).read_bytes() == path.read_bytes()
    # also a model that was opened
    load_bundle(path).save(path.with_name("opened"))
    assert path.with_name("opened").read_bytes() == path.read_bytes()


def test_a_file_cut_in_half_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for size in (0, 4, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="not a complete model file"):
            load_bundle(path)


def test_other_files_are_refused_with_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="is not a plain vision transformer"):
        load_bundle(path)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(ValueError, match="not a complete model file"):
        load_bundle(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_bundle(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        load_bundle(tmp_path / "empty")


def test_nan_in_the_weights_is_refused(tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"head\.weight holds 1 NaN"):
        load_bundle(save(tmp_path / "model.safetensors", model))


def test_files_of_earlier_versions_open_or_say_what_is_gone(path: Path) -> None:
    content = read_model_file(path)
    for change, gone in (
        ({"distilled": False}, ""),
        ({"mlp": "swiglu"}, "unknown mlp 'swiglu'; known: gelu, relu2"),
    ):
        architecture = content.metadata["architecture"] | change
        metadata = {**content.metadata, "architecture": architecture}
        write_model_file(path, replace(content, metadata=metadata))
        if gone:
            with pytest.raises(ValueError, match=gone):
                load_bundle(path)
        else:
            assert load_bundle(path).class_names == ("ant", "bee", "cow")


def test_class_names_must_match_the_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 class names for a model of 3 classes"):
        save(tmp_path / "model.safetensors", make_model(), class_names=("a", "b"))
    with pytest.raises(ValueError, match="2 class names for a model of 3 classes"):
        Bundle.from_model(make_model(), class_names=["a", "b"])


@pytest.mark.parametrize("version", [2, 99])
def test_another_schema_is_refused(path: Path, version: int) -> None:
    save_file(load_file(path), path, metadata={"vit": json.dumps({"schema_version": version})})
    with pytest.raises(ValueError, match=rf"has schema version {version}, .* upgrade vit-pipeline"):
        load_bundle(path)


def test_own_module_has_numbered_classes_and_its_own_size() -> None:
    model = make_model().train()
    bundle = Bundle.from_model(model)
    assert bundle.model is model
    assert not model.training
    assert bundle.class_names == ("class 0", "class 1", "class 2")
    assert bundle.preprocess == Preprocess(image_size=(8, 16))
    assert bundle.name == "VisionTransformer"
    assert bundle.sha256 == Bundle.from_model(make_model()).sha256


def test_a_module_that_tells_nothing_needs_both() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="image size of Linear unknown; give preprocess"):
        Bundle.from_model(module, class_names=["a", "b"])
    # Maps that are the same for every class need no names.
    unnamed = Bundle.from_model(module, preprocess=Preprocess((1, 2)))
    assert unnamed.class_names == ()
    with pytest.raises(ValueError, match=r"Linear has no classifier.*give class_names"):
        require_classifier(unnamed)
    named = Bundle.from_model(module, class_names=["a", "b"], preprocess=Preprocess((1, 2)))
    assert named.class_names == ("a", "b")


def test_paths_bundles_and_modules_are_opened(path: Path) -> None:
    bundle = open_model(path, device="cpu")
    assert bundle.sha256 == open_model(str(path.parent), device="cpu").sha256
    assert open_model(bundle, device="cpu") is bundle
    assert open_model(make_model(), device="cpu").class_names[0] == "class 0"
    with pytest.raises(ValueError, match="empty list"):
        open_model([])
    with pytest.raises(ValueError, match="a Bundle has its own"):
        open_model(bundle, class_names=("a", "b", "c"))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.eye(2, 16), None),
        (np.full((2, 16), np.nan), "holds 32 NaN or infinite values"),
    ],
)
def test_impossible_features_are_refused_when_the_file_is_opened(
    path: Path, features: np.ndarray, message: str | None
) -> None:
    likeness = Likeness(features.astype(np.float16), np.array([1.5], dtype=np.float32))
    write_model_file(path, replace(read_model_file(path), likeness=likeness))
    if message is None:
        assert load_bundle(path).likeness is not None
        return
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        load_bundle(path)
