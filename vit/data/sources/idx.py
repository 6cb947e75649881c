"""idx files, the format of MNIST and its successors: train-images-idx3-ubyte.gz and so on."""

import gzip
import math
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vit.data.class_names import ClassChoice
from vit.data.dataset import ImageDataset, SourceSplits
from vit.data.sources.base import ArrayReader
from vit.runtime.files import open_regular

_IMAGES_FILE = re.compile(r"(train|t10k|test)-images[-.]idx3-ubyte(?:\.gz)?")
# bytes of an unpacked .gz file; Extended MNIST's largest one has 547 million
_MAX_UNPACKED = 2**30
_SPLIT_OF = {"train": "train", "t10k": "test", "test": "test"}


def list_idx(folder: Path) -> dict[str, Path]:
    """Find the idx files of images that lie in `folder`: split → file."""
    matches = {path: _IMAGES_FILE.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return {_SPLIT_OF[match[1]]: path for path, match in matches.items() if match}


def find_idx(
    name: str,
    files: dict[str, Path],
    classes: ClassChoice,
    *,
    class_names: Sequence[str] | None = None,
    num_digits: int = 5,
) -> SourceSplits:
    """Find the splits of idx files.

    Args:
        name: The data.name.
        files: Split → the file of its images, with that of its labels beside it.
        classes: Classes to keep, by name; None keeps all.
        class_names: Names in the order of the labels; None names the classes by their numbers.
        num_digits: Digits of the number in an image's name.

    Raises:
        ValueError: A file is damaged, or images and labels don't fit.
        FileNotFoundError: The labels are missing.
    """

    def load(split: str) -> ImageDataset:
        images = read_idx(files[split], dimensions=3)
        labels = _read_labels(files[split])
        if len(images) != len(labels):
            text = f"{len(images)} images, and its file of labels {len(labels)} labels"
            raise ValueError(f"{files[split]} holds {text}; download both files again")

        names = class_names
        if names is None:
            # the training labels say which classes there are
            training_labels = _read_labels(files.get("train", files[split]))
            names = [str(number) for number in range(training_labels.max(initial=0) + 1)]
        if labels.max(initial=0) >= len(names):
            text = f"label {labels.max()}, and there are {len(names)} classes"
            text += "; check that the files are of one data set"
            raise ValueError(f"the {split} split of {files[split].parent} holds {text}")

        dataset = ImageDataset(
            name=name,
            class_names=tuple(names),
            labels=labels,
            ids=[f"{split}/{index:0{num_digits}d}" for index in range(len(images))],
            reader=ArrayReader(images),
        )
        return dataset.keep_classes(classes)

    return SourceSplits({split: path.name for split, path in files.items()}, load)


def _read_labels(images_file: Path) -> np.ndarray:
    """Read the labels beside a file of images, int64 [n]."""
    name = images_file.name.replace("images", "labels").replace("idx3", "idx1")
    return read_idx(images_file.with_name(name), dimensions=1).astype(np.int64)


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """Read an idx file, plain or .gz, as uint8 of its shape.

    The format: two zero bytes, 8 for unsigned bytes, the number of dimensions, each as a big-endian
    32-bit number, then the values.

    Args:
        path: The file.
        dimensions: 3 for images, 1 for labels.

    Raises:
        ValueError: It isn't such a file, is cut off, is empty, or unpacks to more than 1 GiB.
    """
    try:
        with open_regular(path) as stored:
            is_packed = path.suffix == ".gz"
            file = gzip.GzipFile(fileobj=stored) if is_packed else stored
            header = file.read(4 + 4 * dimensions)
            shape = np.frombuffer(header, dtype=">u4", offset=4).tolist()
            if header[:4] != bytes([0, 0, 8, dimensions]) or len(shape) != dimensions:
                raise ValueError(f"it does not hold unsigned bytes in {dimensions} dimensions")
            # the stated size is compared before memory is taken; 4 MB can unpack to 4 GB
            num_bytes = math.prod(shape)
            limit = _MAX_UNPACKED if is_packed else os.fstat(stored.fileno()).st_size
            if not 0 < num_bytes <= limit:
                raise ValueError(f"its header says {num_bytes:,} bytes; it may hold 1 to {limit:,}")
            # a byte more shows that the header is of another file
            content = file.read(num_bytes + 1)
            if len(content) != num_bytes:
                raise ValueError(f"its header says {num_bytes:,} bytes, and it holds others")
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete idx file: {error}; download it again"
        ) from error
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
