"""Sets of torchvision by name, on small files in their layouts, and idx files."""

import gzip
import pickle
import socket
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets

from vit.data.open import open_dataset


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def cifar_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10's files with twenty pictures each; checksums are those of the fixture."""
    root = tmp_path / "cifar"
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)

    def write(name: str, content: object) -> list[str]:
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, datasets.utils.calculate_md5(folder / name)]

    def batch() -> dict[str, object]:
        return {"data": random.integers(0, 256, (20, 3072), dtype=np.uint8), "labels": [0, 1] * 10}

    batches = [write(f"data_batch_{number}", batch()) for number in range(1, 6)]
    monkeypatch.setattr(datasets.CIFAR10, "train_list", batches)
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [write("test_batch", batch())])
    name, md5 = write("batches.meta", {"label_names": ["airplane", "automobile"]})
    meta = {"filename": name, "key": "label_names", "md5": md5}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    return root


def test_cifar_is_read_from_its_published_files(cifar_root: Path) -> None:
    splits = open_dataset("cifar10", root=cifar_root)
    train, held, test = (splits.split(split) for split in ("train", "validation", "test"))
    assert (len(train), len(held), len(test)) == (90, 10, 20)
    assert train.class_names == ("airplane", "automobile")
    assert not set(train.ids) & set(held.ids)
    raw = pickle.loads((cifar_root / "cifar-10-batches-py" / "test_batch").read_bytes())
    expected = raw["data"][3].reshape(3, 32, 32).transpose(1, 2, 0)
    np.testing.assert_array_equal(np.asarray(test.image(3)), expected)
    assert test.ids[3] == "test/00003"


def test_a_damaged_file_is_not_read_and_a_failed_download_says_what_to_do(
    cifar_root: Path,
) -> None:
    file = cifar_root / "cifar-10-batches-py" / "data_batch_2"
    file.write_bytes(file.read_bytes()[:-1])
    text = r"cifar10 could not be downloaded .*no route.*put torchvision's files of it into"
    with pytest.raises(OSError, match=text):
        open_dataset("cifar10", root=cifar_root)


def test_a_set_may_be_called_as_torchvision_calls_it(cifar_root: Path) -> None:
    assert len(open_dataset("torchvision:CIFAR10", root=cifar_root).split("test")) == 20
    with pytest.raises(ValueError, match="SVHN"):
        open_dataset("torchvision:SVHN")


@pytest.mark.parametrize("content", [b"", b"\0\0\x0a\x03" * 5, bytes(range(200))])
def test_damaged_files_without_a_checksum_are_named(tmp_path: Path, content: bytes) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{split}-{kind}-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=r"the files of mnist in .* can't be read .*copy them"):
        open_dataset("mnist", root=tmp_path)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_from_a_folder(tmp_path: Path, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 7, 5))
    labels = np.arange(30) % 3
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte{suffix}", pixels)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte{suffix}", labels)

    dataset = open_dataset("mnist", root=tmp_path).split("test")
    assert dataset.class_names[2] == "2 - two"
    assert dataset.labels.tolist() == labels.tolist()
    np.testing.assert_array_equal(np.asarray(dataset.image(7))[..., 1], pixels[7])

    file = tmp_path / f"t10k-images-idx3-ubyte{suffix}"
    for change in (
        lambda: file.write_bytes(file.read_bytes()[:-9]),
        lambda: write_idx(file, pixels[:29]),
    ):
        change()
        with pytest.raises(ValueError, match=r"t10k|test images of mnist"):
            open_dataset("mnist", root=tmp_path)
