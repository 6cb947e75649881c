"""Batches made on a GPU, beside the CPU's."""

from pathlib import Path

import pytest
import torch

from tests.data.augments import AUGMENTS, PREPROCESS, build_loader
from vit.data.cache import decode_dataset
from vit.data.open import open_dataset


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("pipeline", ["resident", "cached", "workers"])
def test_batches_equal_the_cpus(
    device: torch.device, photos: Path, tmp_path: Path, pipeline: str, name: str
) -> None:
    augment = AUGMENTS[name]
    dataset = open_dataset("folder", root=photos).split("all")
    if pipeline != "workers":
        dataset = decode_dataset(dataset, PREPROCESS, cache_dir=tmp_path)
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
            is_resident=pipeline == "resident",
        )
        batches.append([list(loader.epoch(0)), list(loader.epoch(1, image_size=(8, 12)))])
        loader.close()
    pairs = [
        pair
        for is_scaled in (False, True)
        for pair in zip(batches[0][is_scaled], batches[1][is_scaled], strict=True)
    ]
    for batch, expected in pairs:
        assert batch.images.device.type == device.type
        assert torch.equal(batch.labels.cpu(), expected.labels)
        torch.testing.assert_close(batch.images.cpu(), expected.images, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(batch.targets.cpu(), expected.targets, rtol=1e-5, atol=1e-5)
