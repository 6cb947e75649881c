"""Batches: each loader and each augmentation, with one copy to the device and no wait."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import save_noise
from tests.data.augments import AUGMENTS, PREPROCESS, build_loader
from tests.runtime.conftest import Count, Counter, Meter
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageDataset
from vit.data.loader import Batch
from vit.data.open import open_dataset


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageDataset]:
    """Thirty-six photos, decoded for one pipeline and only looked at for the other."""
    root = tmp_path_factory.mktemp("photos")
    names = [f"{name}/{number}.png" for name in "abc" for number in range(12)]
    save_noise(root, names, size=(40, 48))
    source = open_dataset("folder", root=root).split("all")
    resident = decode_dataset(source, PREPROCESS, cache_dir=root / "cache")
    return {"resident": resident, "cached": resident, "workers": source}


def read(
    datasets: dict[str, ImageDataset],
    kind: str,
    device: str,
    on_batch: Callable[[], object],
    **changes: Any,
) -> list[Batch]:
    options: dict[str, Any] = {
        "batch_size": 12,
        "seed": 3,
        "device": device,
        "preprocess": PREPROCESS,
    }
    options |= {"workers": 0} | changes
    options["is_resident"] = kind == "resident"
    loader, batches = build_loader(datasets[kind], **options), []
    for epoch, size in ((0, None), (1, (8, 12))):
        for batch in loader.epoch(epoch, image_size=size):
            batches.append(Batch(*(tensor.cpu() for tensor in batch)) if device == "cpu" else batch)
            on_batch()
    loader.close()
    return batches


@pytest.mark.parametrize("name", AUGMENTS)
@pytest.mark.parametrize("kind", ["resident", "cached", "workers"])
def test_batches_equal_the_cpus_and_take_one_copy(
    datasets: dict[str, ImageDataset],
    meter: Meter,
    table: Callable[..., None],
    kind: str,
    name: str,
) -> None:
    counts: list[Count] = []
    found = read(datasets, kind, "npu", lambda: counts.append(meter.read()), augment=AUGMENTS[name])
    table(f"{kind}, {name}", max(counts[1:]))
    # gathered pixels are in pinned memory already, and go alone
    copies = 2 if kind == "cached" else 1
    assert set(counts[1:]) == {Count(copies, 0, 0)}, meter.lines
    expected = read(datasets, kind, "cpu", lambda: None, augment=AUGMENTS[name])
    for batch, of_cpu in zip(found, expected, strict=True):
        assert all(tensor.device.type == "npu" for tensor in batch)
        assert all(
            torch.equal(tensor.cpu(), other) for tensor, other in zip(batch, of_cpu, strict=True)
        )


def test_the_fixture_counts_a_blocking_copy_as_a_wait(npu: Counter, tmp_path: Path) -> None:
    """And refuses what CUDA would refuse."""
    meter, host = Meter(npu), torch.arange(4)
    device = host.to("npu")
    assert meter.read() == Count(1, 0, 1)
    pinned = torch.empty(4, dtype=torch.int64, pin_memory=True).copy_(host)
    assert torch.equal(pinned.to("npu", non_blocking=True).cpu(), host)
    assert meter.read() == Count(1, 1, 0)
    assert device[device > 1].tolist() == [2, 3]
    assert meter.read().waits == 2
    with pytest.raises(RuntimeError, match="a host tensor"):
        device + host
    with pytest.raises(TypeError, match="copy it to the host first"):
        device.numpy()
