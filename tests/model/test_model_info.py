"""Preprocessing and class names of models of timm, torchvision and Hugging Face."""

import json
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images

from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.model_info import count_classes, find_class_names, find_preprocess


def build_hugging_face(**changes: object) -> torch.nn.Module:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**(sizes | {"image_size": 32, "patch_size": 16} | changes))
    )


class TestTimm:
    def test_imagenet_names_and_values(self) -> None:
        module = timm.create_model("vit_tiny_patch16_224", depth=1)
        names = find_class_names(module)
        assert names[0].startswith("tench")
        assert len(names) == count_classes(module) == 1000
        assert find_preprocess(module) == {
            "image_size": (224, 224),
            "crop_pct": 0.9,
            "mean": (0.5,) * 3,
            "std": (0.5,) * 3,
            "interpolation": "bicubic",
        }

    def test_other_class_counts_are_numbered_and_none_is_empty(self) -> None:
        numbered = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=2)
        assert find_class_names(numbered) == ("class 0", "class 1")
        # names of the head that was replaced
        numbered.pretrained_cfg = {"label_names": ["ant", "bee", "cow"]}
        assert find_class_names(numbered) == ("class 0", "class 1")
        assert find_class_names(timm.create_model("vit_small_patch14_dinov2", depth=1)) == ()
        headless = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
        assert find_class_names(headless) == ()

    def test_a_squashed_image_is_whole(self) -> None:
        """The pixels are those of timm's transform, which rounds to another grid of the resize."""
        module = timm.create_model("vit_tiny_patch16_224", depth=1)
        changes = {"crop_mode": "squash", "crop_pct": 1.0}
        module.pretrained_cfg = {**module.pretrained_cfg, **changes}
        preprocess = Preprocess.from_dict(find_preprocess(module))
        assert preprocess.resize_mode == "stretch"
        image = Image.fromarray(load_sample_images().images[0])
        config = timm.data.resolve_model_data_config(module)
        theirs = timm.data.create_transform(**config, is_training=False)(image)
        difference = (theirs - preprocess([image])[0]).abs()
        assert difference.max() < 0.02


def test_other_modules_have_numbered_classes_and_their_size() -> None:
    module = torchvision.models.VisionTransformer(32, 16, 1, 2, 8, 16, num_classes=3)
    assert find_class_names(module) == ("class 0", "class 1", "class 2")
    assert find_preprocess(module) == {"image_size": (32, 32)}


class TestHuggingFace:
    def test_config_tells_names_and_size(self) -> None:
        module = build_hugging_face(id2label={0: "ant", 1: "bee", 2: "cow"})
        assert find_class_names(module) == ("ant", "bee", "cow")
        preprocess = Preprocess.from_dict(find_preprocess(module))
        assert preprocess == Preprocess((32, 32), 1.0, (0.5,) * 3, (0.5,) * 3, "bilinear")
        processor = transformers.ViTImageProcessor()  # its defaults
        assert (tuple(processor.image_mean), tuple(processor.image_std)) == (
            preprocess.mean,
            preprocess.std,
        )

    def test_the_image_processor_of_its_folder_is_read(self, tmp_path: Path) -> None:
        build_hugging_face().save_pretrained(tmp_path)
        config = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
        module = transformers.ViTForImageClassification.from_pretrained(tmp_path)
        assert Preprocess.from_dict(find_preprocess(module)) == Preprocess(
            (32, 32), 1.0, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic"
        )

    @pytest.mark.parametrize("name", ["CLIPForImageClassification", "Dinov2ForImageClassification"])
    def test_other_models_than_vit_need_their_processor(self, name: str) -> None:
        config = getattr(transformers, name).config_class()
        with torch.device("meta"):
            module = getattr(transformers, name)(config)
        with pytest.raises(
            ValueError, match=r"mean and std of the images of .* unknown; give preprocess="
        ):
            Bundle.from_model(module)
