"""Sets of torchvision by name, on small files in their layouts, and idx files; Fashion-MNIST for
real where Debian's package is installed."""

import csv
import gzip
import hashlib
import json
import socket
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image
from torchvision import datasets

from vit.data.open import open_dataset
from vit.data.sources.registry import find_kind
from vit.data.splits import SplitRule

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return


def write_image(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (level, 0, 0)).save(path)


def write_pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    (folder / "annotations").mkdir(parents=True)
    for split, first in (("trainval", 0), ("test", 4)):
        lines = []
        for number in range(first, first + 4):
            name = ("Abyssinian", "great_pyrenees")[number % 2] + f"_{number}"
            write_image(folder / "images" / f"{name}.jpg", 40 * (number % 2))
            lines.append(f"{name} {number % 2 + 1} {number % 2 + 1} 1")
        (folder / "annotations" / f"{split}.txt").write_text("\n".join(lines))


def write_gtsrb(root: Path) -> None:
    folder = root / "gtsrb"
    for number in range(4):
        name = f"GTSRB/Training/{number % 2:05d}/{number}.ppm"
        write_image(folder / name, 40 * (number % 2))
        write_image(folder / f"GTSRB/Final_Test/Images/{number}.ppm", 40 * (number % 2))
    with (folder / "GT-final_test.csv").open("w", newline="") as file:
        table = csv.writer(file, delimiter=";")
        table.writerows([["Filename", "ClassId"], *([f"{n}.ppm", n % 2] for n in range(4))])


def write_dtd(root: Path) -> None:
    folder = root / "dtd" / "dtd"
    (folder / "labels").mkdir(parents=True)
    for split in ("train", "val", "test"):
        names = [f"{name}/{split}.jpg" for name in ("banded", "dotted")]
        for label, name in enumerate(names):
            write_image(folder / "images" / name, 40 * label)
        (folder / "labels" / f"{split}1.txt").write_text("\n".join(names))


def write_eurosat(root: Path) -> None:
    for number in range(20):
        name = ("Forest", "River")[number % 2]
        write_image(root / f"eurosat/2750/{name}/{number}.jpg", 40 * (number % 2))


def write_food101(root: Path) -> None:
    for split in ("train", "test"):
        content = {name: [f"{name}/{split}"] for name in ("apple_pie", "ramen")}
        for label, name in enumerate(content):
            write_image(root / f"food-101/images/{name}/{split}.jpg", 40 * label)
        (root / "food-101/meta").mkdir(parents=True, exist_ok=True)
        (root / f"food-101/meta/{split}.json").write_text(json.dumps(content))


WRITERS = {
    "pets": (write_pets, ("Abyssinian", "Great Pyrenees"), {"train": 4, "test": 4}),
    "gtsrb": (write_gtsrb, ("0", "1"), {"train": 4, "test": 4}),
    "dtd": (write_dtd, ("banded", "dotted"), {"train": 2, "validation": 2, "test": 2}),
    "eurosat": (write_eurosat, ("Forest", "River"), {"all": 20, "test": 4}),
    "food101": (write_food101, ("apple_pie", "ramen"), {"train": 2, "test": 2}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_published_files_are_read_with_their_splits_labels_and_names(
    name: str, tmp_path: Path
) -> None:
    write, class_names, counts = WRITERS[name]
    write(tmp_path)
    splits = open_dataset(name, root=tmp_path, rule=SplitRule(validation_fraction=0))
    for split, count in counts.items():
        dataset = splits.split(split)
        assert dataset.class_names == class_names
        assert len(dataset) == count
        for index, label in enumerate(dataset.labels):
            red = np.asarray(dataset.image(index))[..., 0].mean()
            assert abs(red - 40 * label) < 3
        # files are decoded by workers and known to the cache
        sizes = dataset.reader.sizes()
        assert sizes is not None
        assert sizes.min() > 0


@pytest.mark.parametrize("name", ["torchvision:PCAM", "torchvision:FER2013", "torchvision:cifar"])
def test_the_error_of_another_set_names_those_that_are_read(name: str) -> None:
    with pytest.raises(ValueError, match=r"known: torchvision:CIFAR10, .*:USPS") as caught:
        open_dataset(name)
    for known in str(caught.value).partition("known: ")[2].split(", "):
        assert find_kind(known) == known


def test_sets_are_read_without_private_attributes_of_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pets(tmp_path)
    monkeypatch.setattr("vit.data.sources.named._SAMPLES", {"OxfordIIITPet": lambda s: s._gone})
    assert open_dataset("pets", root=tmp_path).split("test").labels.tolist() == [0, 1, 0, 1]


def test_arrays_of_svhn_are_read_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    split_list = {}
    pixels = {}
    for split in ("train", "test"):
        pixels[split] = rng.integers(0, 256, (32, 32, 3, 12), dtype=np.uint8)
        labels = np.arange(1, 13)[:, None] % 10 + 1
        file = tmp_path / f"{split}_32x32.mat"
        scipy.io.savemat(file, {"X": pixels[split], "y": labels})
        digest = hashlib.md5(file.read_bytes()).hexdigest()
        split_list[split] = [f"http://nowhere.invalid/{file.name}", file.name, digest]
    monkeypatch.setattr(datasets.SVHN, "split_list", split_list)

    dataset = open_dataset("svhn", root=tmp_path).split("test")
    assert dataset.class_names == tuple("0123456789")
    # the published label 10 is the digit 0
    assert dataset.labels.tolist() == [(number % 10 + 1) % 10 for number in range(1, 13)]
    np.testing.assert_array_equal(np.asarray(dataset.image(5)), pixels["test"][..., 5])

    (tmp_path / "test_32x32.mat").write_bytes(b"damaged")
    with pytest.raises(OSError, match=r"^SVHN could not be downloaded \(.*no route.*put"):
        open_dataset("svhn", root=tmp_path).split("test")


@pytest.mark.parametrize("name", ["mnist", "torchvision:Flowers102", "torchvision:StanfordCars"])
def test_without_a_network_one_line_says_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="put torchvision's files of it into") as error:
        open_dataset(name, root=tmp_path).split("train")
    assert "\n" not in str(error.value)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_from_a_folder(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (30, 7, 5))
    labels = np.arange(30) % 3
    for split in ("train", "t10k"):
        write_idx(tmp_path / f"{split}-images-idx3-ubyte{suffix}", pixels)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte{suffix}", labels)

    dataset = open_dataset("mnist", root=tmp_path).split("test")
    assert dataset.class_names[2] == "2 - two"
    assert dataset.labels.tolist() == labels.tolist()
    np.testing.assert_array_equal(np.asarray(dataset.image(7))[..., 1], pixels[7])
    two = open_dataset("mnist", root=tmp_path, classes=["2 - two", "0 - zero"]).split("test")
    assert two.class_names == ("0 - zero", "2 - two")

    named = open_dataset("fashion_mnist", root=tmp_path).split("test")
    assert named.class_names[2] == "Pullover"

    file = tmp_path / f"t10k-images-idx3-ubyte{suffix}"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"the files of mnist in .* are damaged"):
        open_dataset("mnist", root=tmp_path).split("test")
    write_idx(file, pixels[:29])
    with pytest.raises(ValueError, match="29 images and 30 labels in t10k"):
        open_dataset("mnist", root=tmp_path).split("test")


def test_an_idx_file_that_unpacks_to_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    write_idx(labels, np.arange(4) % 2)
    for sides in ((2**16, 2**8, 2**8), (2**32 - 1,) * 3, (0, 8, 8), (4, 0, 8)):
        header = bytes([0, 0, 8, 3]) + np.array(sides, dtype=">u4").tobytes()
        for file in (path, path.with_suffix("")):
            for other in (path, path.with_suffix("")):
                other.unlink(missing_ok=True)
            file.write_bytes(gzip.compress(header) if file == path else header)
            with pytest.raises(ValueError, match=r"the files of mnist in .* are damaged"):
                open_dataset("mnist", root=tmp_path).split("train")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("oxford-iiit-pet/annotations/trainval.txt", "x", "ValueError: not enough values"),
        ("oxford-iiit-pet/annotations/trainval.txt", "Abyssinian_0 -3 1 1", "labels from -4 to"),
        (
            "gtsrb/GT-final_test.csv",
            "Filename;ClassId\na.ppm;999999999",
            "labels from 0 to 999999999",
        ),
        ("food-101/meta/train.json", "[1]", "AttributeError"),
    ],
)
def test_damaged_lists_of_published_sets_are_one_line(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    name = {"oxford-iiit-pet": "pets", "gtsrb": "gtsrb", "food-101": "food101"}[file.split("/")[0]]
    WRITERS[name][0](tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=rf"in {tmp_path} are damaged \(.*{message}"):
        open_dataset(name, root=tmp_path).split("all")


@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist")
def test_fashion_mnist_as_debian_packages_it() -> None:
    splits = open_dataset("fashion_mnist", root=FASHION_MNIST)
    test = splits.split("test")
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert test.class_names[0] == "T-shirt/top"
    assert test.class_names[test.labels[0]] == "Ankle boot"
    assert test.image(0).size == (28, 28)
    train = splits.split("train")
    assert len(train) + len(splits.split("validation")) == 60_000
