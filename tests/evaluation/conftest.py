"""Predictions with known statistics, and a small model file on the digits."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.records import write_evaluation
from vit.bundle import Bundle, load_bundle, save_bundle
from vit.data.cache import decode_dataset
from vit.data.images import Preprocess
from vit.data.open import open_dataset
from vit.evaluation.images import Images, load_images
from vit.evaluation.metrics import Ints
from vit.evaluation.predictor import Logits
from vit.model.vision_transformer import VisionTransformer

MakePredictions = Callable[..., tuple[Logits, Ints]]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIT_CACHE", str(tmp_path_factory.mktemp("vit_cache")))
        yield


@pytest.fixture(scope="session")
def make_predictions() -> MakePredictions:
    """Logits whose softmax is the chance of each label: a model that knows how sure it may be."""

    def make(
        count: int = 2000, classes: int = 10, *, sharpness: float = 2.0, seed: int = 0
    ) -> tuple[Logits, Ints]:
        rng = np.random.default_rng(seed)
        logits = sharpness * rng.standard_normal((count, classes))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        return logits.astype(np.float32), labels

    return make


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory, _cache: None) -> Path:
    """A few steps of training on the digits: better than chance, far from perfect."""
    torch.manual_seed(0)
    source = open_dataset("digits").split("train")
    preprocess = Preprocess((8, 8), mean=(0.3, 0.3, 0.3), std=(0.4, 0.4, 0.4))
    dataset = decode_dataset(source, size=preprocess.resize_size, progress=False)
    model = VisionTransformer(img_size=8, patch_size=2, num_classes=10, embed_dim=32, depth=2, num_heads=2)
    images = preprocess.normalize(torch.from_numpy(np.array(dataset.images)))
    labels = torch.from_numpy(dataset.labels)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        batch = torch.randint(len(labels), (64,))
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_bundle(
        path,
        model.eval(),
        preprocess=preprocess,
        class_names=source.class_names,
        config={"data": {"name": "digits"}, "train": {"seed": 0}},
        data={"name": "digits", "fingerprint": dataset.fingerprint},
        training_hashes=(dataset.digests, dataset.perceptual),
    )
    return path


@pytest.fixture(scope="session")
def bundle(model_file: Path) -> Bundle:
    return load_bundle(model_file)


@pytest.fixture(scope="session")
def images(bundle: Bundle) -> Images:
    """The digits' test split."""
    return load_images(
        open_dataset("digits"),
        "test",
        preprocess=bundle.preprocess,
        class_names=bundle.class_names,
        progress=False,
    )


MakeEvaluation = Callable[..., Path]


@pytest.fixture
def make_evaluation(tmp_path: Path) -> MakeEvaluation:
    """make_evaluation(name, ranks, …) writes an evaluation directory."""
    return partial(write_evaluation, tmp_path)
