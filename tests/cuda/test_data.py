"""Batches made on a GPU, beside the CPU's."""

from pathlib import Path

import pytest
import torch

from tests.data.augments import AUGMENTS, PREPROCESS, build_loader
from vit.data.cache import decode_dataset
from vit.data.gather import choose_stored
from vit.data.open import open_dataset


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("pipeline", ["resident", "cached", "workers"])
def test_batches_equal_the_cpus(
    device: torch.device, photos: Path, tmp_path: Path, pipeline: str, name: str
) -> None:
    augment = AUGMENTS[name]
    preprocess = PREPROCESS
    if pipeline == "cached":
        preprocess = choose_stored(PREPROCESS, augment.crop)
    dataset = open_dataset("folder", root=photos).split("all")
    if pipeline != "workers":
        size = preprocess.resize_size
        dataset = decode_dataset(
            dataset, size=size, cache_dir=tmp_path, progress=False, preprocess=preprocess
        )
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
            gathers=pipeline == "cached",
        )
        batches.append([list(loader.epoch(0)), list(loader.epoch(1, image_size=(8, 12)))])
        loader.close()
    pairs = [
        (*pair, is_scaled)
        for is_scaled in (False, True)
        for pair in zip(batches[0][is_scaled], batches[1][is_scaled], strict=True)
    ]
    for batch, expected, is_scaled in pairs:
        assert batch.images.device.type == device.type
        assert torch.equal(batch.labels.cpu(), expected.labels)
        if name == "RandAugment":
            assert_nearly_all_equal(batch.images.cpu(), expected.images, is_scaled=is_scaled)
        else:
            torch.testing.assert_close(batch.images.cpu(), expected.images, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(batch.targets.cpu(), expected.targets, rtol=1e-5, atol=1e-5)


def assert_nearly_all_equal(
    images: torch.Tensor, expected: torch.Tensor, *, is_scaled: bool
) -> None:
    """An operation of RandAugment ends on whole grey levels, as Pillow's do: where a value lies
    between two of them, the last bits of its position decide which one it gets.

    Where images were scaled before, its input may be rounded the other way, too. Brightness, contrast
    and sharpness multiply this level by up to 1.81 at magnitude 9, so that it comes out as up to two.
    Autocontrast and equalize have no bound. On a CPU, with 1e-3 added at random to the scaled values,
    a hundred times the error of float32, 48 of 864 images passed two levels.
    """
    level = 1 / (255 * min(PREPROCESS.std))
    difference = (images - expected).abs()
    assert float((difference > 1e-5).float().mean()) < 1e-2
    if not is_scaled:
        assert float(difference.max()) <= 1.001 * level
    else:
        by_image = difference.flatten(1).amax(1)
        assert int((by_image > 2.001 * level).sum()) <= 1
