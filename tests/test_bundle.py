"""Model files: self-sufficient, whole, without pickle, the same bytes for the same model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vit
from vit.bundle import (
    Bundle,
    load_bundle,
    open_model,
    require_classifier,
    update_metadata,
)
from vit.data.preprocess import Preprocess
from vit.model.model_file import (
    Likeness,
    compute_checksum,
    read_model_file,
    write_model_file,
)
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


def test_a_bundle_needs_nothing_else(tmp_path: Path) -> None:
    model = make_model()
    bundle = load_bundle(save(tmp_path / "model.safetensors", model))
    images = torch.randn(2, 3, 8, 16)
    assert torch.equal(bundle.model(images), model(images))
    assert not bundle.model.training
    assert bundle.class_names == ("ant", "bee", "cow")
    assert bundle.preprocess.image_size == (8, 16)
    assert bundle.preprocess.mean == (0.1, 0.2, 0.3)
    assert bundle.config == {"train": {"epochs": 3}}
    assert bundle.data["fingerprint"] == "f" * 64
    assert bundle.metadata["versions"]["vit"] == vit.__version__
    assert bundle.training_hashes is not None
    assert bundle.training_hashes[0].tolist() == [1, 2**64 - 1]


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (save(tmp_path / name, make_model()).read_bytes() for name in ("a", "b"))
    assert first == second


def test_loading_moves_no_random_numbers(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", make_model())
    before = torch.get_rng_state()
    load_bundle(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_metadata_can_be_added_without_touching_the_weights(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", make_model())
    before = load_file(path)
    assert load_bundle(path).temperature == 1.0
    update_metadata(path, {"temperature": 1.5})
    assert load_bundle(path).temperature == 1.5
    after = load_file(path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_file_cut_in_half_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", make_model())
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


def test_weights_that_do_not_fit_their_architecture_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", make_model())
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["vit"])
    metadata["architecture"]["embed_dim"] = 32
    metadata.pop("content_sha256")
    metadata["content_sha256"] = compute_checksum(tensors, metadata)
    save_file(tensors, path, metadata={"vit": json.dumps(metadata)})
    with pytest.raises(ValueError, match="does not fit this model"):
        load_bundle(path)


def test_files_of_earlier_versions_open_or_say_what_to_do(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", make_model())
    content = read_model_file(path)
    for distilled in (False, True):
        architecture = content.metadata["architecture"] | {"distilled": distilled}
        metadata = {**content.metadata, "architecture": architecture}
        write_model_file(path, replace(content, metadata=metadata))
        if distilled:
            with pytest.raises(ValueError, match="distilled model, which vit has no more; train"):
                load_bundle(path)
        else:
            assert load_bundle(path).class_names == ("ant", "bee", "cow")


def test_class_names_must_match_the_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 class names for a model of 3 classes"):
        save(tmp_path / "model.safetensors", make_model(), class_names=("a", "b"))


@pytest.mark.parametrize("version", [2, 99])
def test_another_schema_is_refused(tmp_path: Path, version: int) -> None:
    path = save(tmp_path / "model.safetensors", make_model())
    save_file(load_file(path), path, metadata={"vit": json.dumps({"schema_version": version})})
    with pytest.raises(ValueError, match=rf"has schema version {version}, .* upgrade vit-pipeline"):
        load_bundle(path)


class TestModules:
    """A raw module becomes a bundle."""

    def test_own_model_has_numbered_classes_and_its_own_size(self) -> None:
        model = make_model().train()
        bundle = Bundle.from_model(model)
        assert bundle.model is model
        assert not model.training
        assert bundle.class_names == ("class 0", "class 1", "class 2")
        assert bundle.preprocess == Preprocess(image_size=(8, 16))
        assert bundle.metadata["architecture"] == model.architecture
        assert bundle.name == "VisionTransformer"
        assert bundle.sha256 == Bundle.from_model(make_model()).sha256

    def test_another_number_of_class_names_is_refused(self) -> None:
        with pytest.raises(ValueError, match="2 class names for a model of 3 classes"):
            Bundle.from_model(make_model(), class_names=["a", "b"])

    def test_a_module_that_tells_nothing_needs_both(self) -> None:
        module = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="image size of Linear unknown; give preprocess"):
            Bundle.from_model(module, class_names=["a", "b"])
        # Maps that are the same for every class need no names.
        unnamed = Bundle.from_model(module, preprocess=Preprocess((1, 2)))
        assert unnamed.class_names == ()
        with pytest.raises(
            ValueError, match=r"Linear has no classifier.*if it has one, give class_names"
        ):
            require_classifier(unnamed)
        assert Bundle.from_model(
            module, class_names=["a", "b"], preprocess=Preprocess((1, 2))
        ).class_names == (
            "a",
            "b",
        )

    def test_load_model_takes_paths_bundles_and_modules(self, tmp_path: Path) -> None:
        path = save(tmp_path / "model.safetensors", make_model())
        bundle = open_model(path, device="cpu")
        assert bundle.sha256 == open_model(str(tmp_path), device="cpu").sha256
        assert open_model(bundle, device="cpu") is bundle
        assert open_model(make_model(), device="cpu").class_names[0] == "class 0"


def save_features(path: Path, **changes: Any) -> None:
    """A model file with features of two training images and the distance of one held-out image."""
    parts = {
        "features": np.eye(2, 16, dtype=np.float16),
        "distances": np.array([1.5], dtype=np.float32),
        "num_distances": 1,
        "images": [("a.png", 0), ("b.png", 2)],
        "thresholds": {"0.9": 0.5},
    } | changes
    conformal = {
        "num_images": 9,
        "thresholds": parts["thresholds"],
        "num_training_features": 2,
        "num_distances": parts["num_distances"],
        "training_images": parts["images"],
        "no_likeness": "",
    }
    likeness = Likeness(parts["features"], parts["distances"])
    content = read_model_file(save(path, make_model()))
    metadata = {**content.metadata, "conformal": conformal}
    write_model_file(path, replace(content, metadata=metadata, likeness=likeness))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": np.eye(2, 10, dtype=np.float16)}, "its model has 16 features"),
        ({"features": np.full((2, 16), np.nan, np.float16)}, "holds 32 NaN or infinite values"),
    ],
)
def test_impossible_features_are_refused_when_the_file_is_opened(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "model.safetensors"
    save_features(path)
    assert load_bundle(path).likeness is not None
    save_features(path, **changes)
    with pytest.raises(ValueError, match=rf"{path}.*{message}"):
        load_bundle(path)
