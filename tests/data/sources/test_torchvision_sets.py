"""Sets of torchvision by name, on small files in their layouts, and idx files; Fashion-MNIST for
real where Debian's package is installed."""

import gzip
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from vit.data.open import open_dataset
from vit.data.splits import SplitRule

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


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


def test_published_files_are_listed_by_their_splits(tmp_path: Path) -> None:
    folder = tmp_path / "dtd" / "dtd"
    (folder / "labels").mkdir(parents=True)
    for split in ("train", "val", "test"):
        names = [f"{name}/{split}.jpg" for name in ("banded", "dotted")]
        for label, name in enumerate(names):
            path = folder / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), (40 * label, 0, 0)).save(path)
        (folder / "labels" / f"{split}1.txt").write_text("\n".join(names))
    splits = open_dataset("torchvision:DTD", root=tmp_path, rule=SplitRule(validation_fraction=0))
    for split in ("train", "validation", "test"):
        dataset = splits.split(split)
        assert dataset.class_names == ("banded", "dotted")
        assert dataset.labels.tolist() == [0, 1]
        reds = [np.asarray(dataset.image(index))[..., 0].mean() for index in range(2)]
        assert reds == pytest.approx([0, 40], abs=3)
    (folder / "labels" / "train1.txt").write_text("x")
    with pytest.raises(ValueError, match=r"the files of torchvision:DTD in .* can't be read"):
        open_dataset("torchvision:DTD", root=tmp_path)


@pytest.mark.parametrize("name", ["FER2013", "SUN397", "cifar", "Nothing"])
def test_other_sets_are_passed_from_python(name: str) -> None:
    with pytest.raises(ValueError, match=r"pass others from Python as dataset=…"):
        open_dataset(f"torchvision:{name}")


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
    change_size: list[Callable[[], object]] = [
        lambda: file.write_bytes(file.read_bytes()[:-9]),
        lambda: write_idx(file, pixels[:29]),
    ]
    for change in change_size:
        change()
        with pytest.raises(ValueError, match=r"the files of mnist in .* can't be read"):
            open_dataset("mnist", root=tmp_path)
    # what would unpack to gigabytes takes no memory
    for sides in ((2**16, 2**8, 2**8), (2**32 - 1,) * 3, (0, 8, 8)):
        header = bytes([0, 0, 8, 3]) + np.array(sides, dtype=">u4").tobytes()
        file.write_bytes(gzip.compress(header) if suffix else header)
        with pytest.raises(ValueError, match=r"the files of mnist in .* can't be read"):
            open_dataset("mnist", root=tmp_path)


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_fashion_mnist_as_debian_packages_it() -> None:
    splits = open_dataset("fashion_mnist", root=FASHION_MNIST)
    test = splits.split("test")
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert test.class_names[0] == "T-shirt/top"
    assert test.class_names[test.labels[0]] == "Ankle boot"
    assert test.image(0).size == (28, 28)
    assert len(splits.split("train")) + len(splits.split("validation")) == 60_000
