"""Features of each block are what a model that ends there classifies by."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.model.logits import PRE_LOGITS
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.batch_predictor import BatchPredictor, compute_features

SIZE = (8, 8)


def make_model(**arguments: object) -> VisionTransformer:
    torch.manual_seed(0)
    values = {"embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 10} | arguments
    model = VisionTransformer(SIZE, 2, **values).eval()
    for parameter in model.parameters():
        # norms that scale, tokens that differ
        nn.init.normal_(parameter, std=0.3)
    return model


def make_predictor(model: nn.Module, **arguments: object) -> BatchPredictor:
    values = {"preprocess": Preprocess(SIZE), "num_classes": 10, "batch_size": 16}
    values |= {"device": torch.device("cpu"), "precision": "float32"}
    return BatchPredictor(model, **(values | arguments))


@pytest.fixture
def dataset(empty_cache: Path) -> ImageDataset:
    images = open_dataset("digits").split("test").subset(range(40))
    return decode_dataset(images, Preprocess(SIZE))


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_features_are_what_the_head_of_a_model_cut_there_reads(
    dataset: ImageDataset, pool: str, fc_norm: bool, depth: int
) -> None:
    model = make_model(class_token=True, reg_tokens=2, fc_norm=fc_norm)
    features = compute_features(make_predictor(model), dataset)

    cut_model = VisionTransformer(
        **model.architecture | {"depth": depth, "global_pool": pool, "num_classes": 0}
    )
    cut_model.load_state_dict(model.state_dict(), strict=False)
    pixels = torch.from_numpy(np.array(dataset.pixels))
    with torch.inference_mode():
        expected = cut_model.eval()(Preprocess(SIZE).normalize(pixels))
    assert len(features) == 6
    torch.testing.assert_close(features[depth, pool], expected, rtol=1e-5, atol=1e-5)


def test_features_of_another_librarys_model_are_what_its_head_reads(dataset: ImageDataset) -> None:
    size = (32, 32)
    model = timm.create_model("test_vit", num_classes=10, img_size=size).eval()
    predictor = make_predictor(model, preprocess=Preprocess(size))
    images = replace(dataset.subset(range(3)), pixels=None)
    features = compute_features(predictor, images)
    inputs = Preprocess(size)([images.image(index) for index in range(3)])
    with torch.inference_mode():
        expected = model.forward_head(model.forward_features(inputs), pre_logits=True)
    torch.testing.assert_close(features[PRE_LOGITS], expected)

    with pytest.raises(ValueError, match="features of Sequential are unknown"):
        compute_features(make_predictor(nn.Sequential(nn.Flatten())), dataset)
