"""Batches made on a GPU, beside the CPU's."""

from pathlib import Path

import pytest
import torch

from tests.data.augments import AUGMENTS, PREPROCESS, build_loader
from vit.data.augment import Augmentation
from vit.data.cache import decode_dataset
from vit.data.open import open_dataset


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("pipeline", ["resident", "workers"])
def test_batches_equal_the_cpus(
    device: torch.device, photos: Path, tmp_path: Path, pipeline: str, name: str
) -> None:
    size = PREPROCESS.resize_size if pipeline == "resident" else None
    source = open_dataset("folder", root=photos).split("all")
    dataset = decode_dataset(source, size=size, cache_dir=tmp_path, progress=False)
    augment = AUGMENTS[name]
    if name == "RandAugment":
        # a second operation may draw two grey levels far apart
        augment = Augmentation(rand_augment=(1, 9.0))
    batches = []
    for place in (device, torch.device("cpu")):
        loader = build_loader(
            dataset,
            batch_size=12,
            seed=3,
            device=place,
            preprocess=PREPROCESS,
            workers=0,
            augment=augment,
        )
        batches.append(list(loader.epoch(0)) + list(loader.epoch(1, image_size=(8, 12))))
        loader.close()
    for batch, expected in zip(*batches, strict=True):
        assert batch.images.device.type == device.type
        assert torch.equal(batch.labels.cpu(), expected.labels)
        if name == "RandAugment":
            assert_nearly_all_equal(batch.images.cpu(), expected.images)
        else:
            torch.testing.assert_close(batch.images.cpu(), expected.images, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(batch.targets.cpu(), expected.targets, rtol=1e-5, atol=1e-5)


def assert_nearly_all_equal(images: torch.Tensor, expected: torch.Tensor) -> None:
    """An operation of RandAugment ends on whole grey levels, as Pillow's do: where a value lies
    between two of them, the last bits of its position decide which one it gets."""
    level = 1 / (255 * min(PREPROCESS.std))
    difference = (images - expected).abs()
    assert float(difference.max()) <= 1.001 * level
    assert float((difference > 1e-5).float().mean()) < 1e-2
