"""Each reader of files of others: valid files drawn at random give each image its own label, and
damaged ones a right result or one sentence, without starting a program."""

import csv
import io
import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vit.config import load_config
from vit.data.cache import decode_dataset
from vit.data.corrections import read_corrections
from vit.data.dataset import ImageRule
from vit.data.images import read_image
from vit.data.open import open_dataset, require_kind
from vit.data.preprocess import Preprocess

# every kind of place is read whatever characters are in its path
NAMES = ["photos #2", "a:b", "it's", 'a "b"', "a[1] {x}", "100 %", "a,b; c|d", "größe"]
LETTERS = ["a", "Ä", "z ", "0", "-", "猫", "'", "#", "é", "B"]
FORMATS = ["avif", "bmp", "gif", "jpg", "png", "ppm", "tif", "webp", "dds", "eps", "tga", "ico"]
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn")
_watched = [False]


def _refuse_programs(event: str, _: object) -> None:
    if _watched[0] and event in PROGRAMS:
        pytest.fail(f"{event}: a program was started")


sys.addaudithook(_refuse_programs)


@contextmanager
def refusals() -> Iterator[None]:
    """Let a user's mistake end in one sentence."""
    sentence = "read"
    _watched[0] = True
    try:
        yield
    except (ValueError, OSError) as error:
        sentence = str(error)
    finally:
        _watched[0] = False
    assert 0 < len(sentence) < 3000
    assert "\n" not in sentence
    assert " at 0x" not in sentence


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Change, remove, repeat or cut bytes at one to eight places."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place, kind = rng.randrange(len(data) + 1), rng.randrange(5)
        length = rng.choice((1, 2, 4, 16, 256, 4096))
        if kind == 0:
            data[place : place + length] = rng.randbytes(length)
        elif kind == 1:
            data[place : place + length] = rng.choice((b"\0", b"\xff", b"9")) * length
        elif kind == 2:
            del data[place : place + length]
        elif kind == 3:
            data[place:place] = data[place : place + length] * rng.choice((1, 2, 50))
        else:
            del data[place:]
    return bytes(data)


def draw_truth(rng: random.Random) -> dict[str, str]:
    """Draw classes for twelve images: each image's number → its class."""
    names = {"".join(rng.choices(LETTERS, k=3)).strip() for _ in range(3)} | {"cat", "dog"}
    labels = [*sorted(names), *rng.choices(sorted(names), k=12 - len(names))]
    rng.shuffle(labels)
    return {f"{number:02d}": label for number, label in enumerate(labels)}


def encode(number: str) -> bytes:
    """An image whose grey tells its number."""
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (20 * int(number),) * 3).save(buffer, "PNG")
    return buffer.getvalue()


# writers: each writes the images of a truth, and returns the place, the data.name and its options

Place = tuple[Path, str, dict[str, Any]]


def write_table(root: Path, truth: dict[str, str], rng: random.Random) -> Place:
    for number in truth:
        place = root / rng.choice(["", "x", "x/y"]) / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encode(number))
    rows = [[number + rng.choice(["", ".png"]), label, "7"] for number, label in truth.items()]
    header = [rng.choice(["path", "File_Name", "image"]), rng.choice(["label", "Class"]), "age"]
    order = rng.sample(range(3), 3)
    text = io.StringIO()
    style = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    table = csv.writer(text, delimiter=rng.choice(",;\t|"), quoting=style)
    table.writerows([[row[place] for place in order] for row in [header, *rows]])
    path = root / rng.choice(["labels.csv", "t.tsv", "t.txt"])
    path.write_bytes(text.getvalue().encode(rng.choice(["utf-8", "utf-8-sig", "utf-16"])))
    return path, "folder", {}


def write_folders(root: Path, truth: dict[str, str], rng: random.Random) -> Place:
    for number, label in truth.items():
        path = root / label / rng.choice(["", "deeper"]) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(number))
    return root, "folder", {}


def write_names(root: Path, truth: dict[str, str], rng: random.Random) -> Place:
    for number, label in truth.items():
        (root / f"{number}_{label}.png").write_bytes(encode(number))
    return root, "folder", {"rule": ImageRule(label_by=r"[0-9]+_(.+)[.]png")}


def write_shards(root: Path, truth: dict[str, str], rng: random.Random) -> Place:
    for shard in range(2):
        with tarfile.open(root / f"s-{shard}.tar", "w") as tar:
            for number, label in list(truth.items())[shard::2]:
                for suffix, content in rng.sample(
                    [("png", encode(number)), ("cls", label.encode())], 2
                ):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return root, "webdataset", {}


def write_parquet(root: Path, truth: dict[str, str], rng: random.Random) -> Place:
    datasets = pytest.importorskip("datasets")
    names = sorted(set(truth.values()))
    feature, values = datasets.Value("string"), list(truth.values())
    if rng.random() < 0.5:
        feature = datasets.ClassLabel(names=rng.sample(names, len(names)))
        values = feature.str2int(values)
    images = [{"bytes": encode(number), "path": None} for number in truth]
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    table = datasets.Dataset.from_dict({"image": images, "label": values}, features=features)
    table.to_parquet(root / "train-0.parquet")
    return root / "train-0.parquet", "huggingface", {}


def write_idx(root: Path, truth: dict[str, str], rng: random.Random) -> Place:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    greys = np.array([20 * int(number) for number in truth], np.uint8)
    names = sorted(set(truth.values()))
    labels = np.array([names.index(label) for label in truth.values()], np.uint8)
    arrays = {"images-idx3": np.tile(greys[:, None, None], (1, 4, 5)), "labels-idx1": labels}
    for kind, array in arrays.items():
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        content = header + array.tobytes()
        for split in ("train", "t10k"):
            (folder / f"{split}-{kind}-ubyte").write_bytes(content)
    return root, "mnist", {}


WRITERS: list[Callable[[Path, dict[str, str], random.Random], Place]] = [
    *(write_table, write_folders, write_names),
    *(write_shards, write_parquet, write_idx),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("seed", range(len(NAMES)))
def test_valid_files_give_each_image_its_label(
    tmp_path: Path, write: Callable[..., Place], seed: int
) -> None:
    rng = random.Random(seed)
    truth = draw_truth(rng)
    folder = tmp_path / NAMES[seed]
    folder.mkdir()
    place, name, options = write(folder, truth, rng)
    assert name == "mnist" or require_kind(place) == name
    splits = open_dataset(name, root=place, **options)
    # MNIST's test images are those of training, and its classes have other names
    dataset = splits.split("test" if name == "mnist" else "all")
    classes = sorted(set(truth.values())) if name == "mnist" else dataset.class_names
    assert len(dataset) == len(truth)
    for index in range(len(dataset)):
        number = round(float(np.asarray(dataset.image(index)).mean()) / 20)
        assert classes[dataset.labels[index]] == truth[f"{number:02d}"]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("seed", range(10))
def test_damaged_files_end_in_a_sentence(
    tmp_path: Path, write: Callable[..., Place], seed: int
) -> None:
    rng = random.Random(seed)
    (tmp_path / "files").mkdir()
    place, name, options = write(tmp_path / "files", draw_truth(rng), rng)
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    for path in rng.sample(sorted(files), min(len(files), 2)):
        path.write_bytes(mutate(path.read_bytes(), rng))
    with refusals():
        splits = open_dataset(name, root=place, **options)
        dataset = splits.split("all")
        assert 0 <= dataset.labels.min() <= dataset.labels.max() < len(dataset.class_names)
        for index in range(len(dataset)):
            with refusals():
                assert dataset.image(index).mode == "RGB"


@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged_images_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(pixels).save(path)
    content = path.read_bytes()
    for seed in range(40):
        path.write_bytes(mutate(content, random.Random(seed)))
        with refusals():
            assert read_image(path).mode == "RGB"


@pytest.mark.parametrize("seed", range(20))
def test_damaged_configurations_and_corrections(tmp_path: Path, tiny_run: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "config.yaml"
    path.write_bytes(mutate((tiny_run / "config.yaml").read_bytes(), rng))
    with refusals():
        load_config(path)
    path = tmp_path / "corrections.csv"
    path.write_bytes(mutate(b"path,given,label\ndigits/00001,1,2\ndigits/00002,2,3\n", rng))
    with refusals():
        read_corrections(path)


@pytest.mark.parametrize("name", ["index.npz", "images.npy"])
@pytest.mark.parametrize("seed", range(2))
def test_a_cut_cache_is_made_again(tmp_path: Path, name: str, seed: int) -> None:
    source = open_dataset("digits").split("validation")
    options: dict[str, Any] = {
        "preprocess": Preprocess((8, 8)),
        "cache_dir": tmp_path,
    }
    pixels = np.array(decode_dataset(source, **options).pixels)
    (folder,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
    path = folder / name
    path.write_bytes(path.read_bytes()[: -random.Random(seed).randrange(1, 4000)])
    with pytest.warns(UserWarning, match="is damaged; it is made again"):
        again = decode_dataset(source, **options)
    assert np.array_equal(np.asarray(again.pixels), pixels)
