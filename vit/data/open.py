"""The one door to images: a data set's name, folder, table or shards → its splits, found once and decoded once.

A split with a folder of its own is that folder. What is missing is held out of the training images, stratified by
class, by the rank of a hash of (seed, id): adding images moves few others between splits. A validation folder without a
test folder (as in ImageNet) is the *test* split, and validation is held out of the training images.
"""

import difflib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.cache import decode_dataset
from vit.data.class_names import name_classes, read_words
from vit.data.dataset import DecodedDataset
from vit.data.images import Preprocess
from vit.data.sets import folders, huggingface, named, remote, shards, tables
from vit.data.sets.given import GIVEN
from vit.data.sets.source import FindOptions, FoundSplit, FoundSplits, ImageSource, Root, join_sources
from vit.runtime.arguments import shorten
from vit.runtime.files import default_cache_dir

# data.name → what finds the splits of that set: a new data set is one line here
FINDERS: Mapping[str, Callable[[FindOptions], FoundSplits]] = {
    "cifar10": partial(named.find_cifar, "cifar10"),
    "cifar100": partial(named.find_cifar, "cifar100"),
    "digits": named.find_digits,
    "folder": folders.find_folder,
    "huggingface": huggingface.find_huggingface,
    "imagenet": named.find_imagenet,
    "imagenette": named.find_imagenette,
    "webdataset": shards.find_shards,
}
_OWN_IMAGES = ("folder", "huggingface", "webdataset")  # named by their root
SPLITS = ("train", "validation", "test", "all")
TEST_FRACTION = 0.2  # of the images, where a set has no test split of its own


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """A data set whose splits are listed when they are asked for, each at most once."""

    name: str
    found: FoundSplits
    validation_fraction: float
    split_seed: int
    cache_dir: Path
    default_split: str = "test"
    title: str = ""  # for readers: the name of a named set, or that of the folder of own images
    test_fraction: float = TEST_FRACTION  # of the images, where there is no test split
    # class → name for those that were given one, of the splits that were listed
    class_names: dict[str, str] = field(default_factory=dict)
    _sources: dict[str, ImageSource] = field(default_factory=dict, init=False)

    def split(self, name: str | None = None) -> ImageSource:
        """The images of "train", "validation", "test" or "all"; of `default_split` for None.

        Raises ValueError for an unknown split, and for one that isn't there or would be empty.
        """
        split = name or self.default_split
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
        if split not in self._sources:
            if split == "all":
                self._sources[split] = join_sources([found.load() for found in self.found.values()])
            elif split in self.found and split != "train":
                self._sources[split] = replace(self.found[split].load(), split=split)
            elif "train" not in self.found:
                raise ValueError(f"there is no {split} split here, only {', '.join(self.found)}")
            else:
                self._hold_out()
        if split not in self._sources:
            fraction = dict(self._held_out)[split]
            raise ValueError(f"the {split} split is empty: {fraction:g} of {len(self._sources['train'])} images")
        return self._sources[split]

    def decode(self, split: str | None, preprocess: Preprocess | None, **options: Any) -> DecodedDataset:
        """A split, decoded to what `preprocess` crops from, or scanned for None; options as of `decode_dataset`."""
        scaling: dict[str, Any] = {"size": None}
        if preprocess is not None:
            scaling = {"size": preprocess.resize_size, "interpolation": preprocess.interpolation}
        return decode_dataset(self.split(split), cache_dir=self.cache_dir, **scaling, **options)

    def describe_splits(self) -> list[str]:
        """What the test and the validation split are made of, a sentence each."""
        rest = self.found["train"].origin if "train" in self.found else ""
        drawn, sentences = dict(self._held_out), []
        for split in ("test", "validation"):
            if split in self.found:
                sentences.append(f"{self.found[split].origin} is the {split} split")
            elif rest and drawn[split]:
                sentences.append(f"{split} is {100 * drawn[split]:g} % of {rest} (seed {self.split_seed})")
                rest = "the rest"
        return sentences

    @property
    def _held_out(self) -> list[tuple[str, float]]:
        """Splits that are drawn from the training images, and the fraction of what is left of these."""
        fractions = (("test", self.test_fraction), ("validation", self.validation_fraction))
        return [(split, fraction) for split, fraction in fractions if split not in self.found]

    def _hold_out(self) -> None:
        rest = self.found["train"].load()
        for split, fraction in self._held_out:
            drawn = _stratified(rest, fraction, f"{self.split_seed}:{split}")
            if drawn.any():
                self._sources[split] = replace(rest.subset(np.flatnonzero(drawn)), split=split)
            rest = rest.subset(np.flatnonzero(~drawn))
        self._sources["train"] = replace(rest, split="train")


def open_dataset(
    name: str,
    *,
    root: Root = None,
    classes: Sequence[str] | None = None,
    class_names: Path | Mapping[str, str] | None = None,
    validation_fraction: float = 0.1,
    split_seed: int = 0,
    cache_dir: Path | None = None,
    remote_cache_gb: float = 32.0,
) -> ImageDataset:
    """Find a data set by its name in `FINDERS`.

    `root`: where the data is or goes; `classes` keeps only those in the set's order, `class_names` names them in words
    (`vit.data.class_names`), `cache_dir` takes decoded images, and of object storage at most `remote_cache_gb`.
    Raises ValueError for an unknown name or class, FileNotFoundError for a missing root, OSError if a download fails.
    """
    if name == GIVEN:
        cure = "give them to vit.train(dataset=…) again, or name other images with --data"
        raise ValueError(f"the images of this model came from a program, not from a file; {cure}")
    if name not in FINDERS:
        near = difflib.get_close_matches(name, FINDERS, n=3) or list(FINDERS)
        raise ValueError(f"unknown data.name {name!r}; nearest: {', '.join(near)}")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction {validation_fraction} must be at least 0 and below 1")
    cache_dir = cache_dir or default_cache_dir()
    if class_names is not None and classes is not None:
        words = class_names if isinstance(class_names, Mapping) else read_words(class_names)
        of_word = {word: of_class for of_class, word in words.items()}
        classes = [of_word.get(given, given) for given in classes]
    found = FINDERS[name](FindOptions(root, classes, cache_dir, remote_cache_gb))
    in_words: dict[str, str] = {}

    def load(of_split: FoundSplit) -> ImageSource:
        source = of_split.load()
        if class_names is None:
            return source
        names = name_classes(source.class_names, class_names)
        in_words.update(zip(source.class_names, names, strict=True))
        return replace(source, class_names=names)

    once = {split: FoundSplit(of_split.origin, cache(partial(load, of_split))) for split, of_split in found.items()}
    title = Path(root).expanduser().absolute().name if root and name in _OWN_IMAGES else name
    shown: dict[str, Any] = {"title": title, "class_names": in_words}
    return ImageDataset(name, once, validation_fraction, split_seed, cache_dir, **shown)


def find_kind(data: Path | str) -> str | None:
    """The `data.name` of a data set's name, or of what is at a path, pattern or "hf:NAME"; None for anything else."""
    text, path = str(data), Path(data).expanduser()
    if text in FINDERS and text not in _OWN_IMAGES:
        return text
    if remote.is_remote(text):
        return "webdataset"
    if text.startswith("hf:") or huggingface.is_dataset(path):
        return "huggingface"
    if text.startswith("pipe:") or ".tar" in text or (path.is_dir() and shards.list_shards(path.glob)):
        return "webdataset"
    return "folder" if tables.is_table(path) or path.is_dir() else None


def open_for_model(data: Root, *, trained_on: Mapping[str, Any], root: Root = None) -> ImageDataset:
    """The data set on which a trained model is evaluated or explained.

    `data` is a data set's name (at `root`, where that is given), or what `find_kind` knows; None is what the model was
    trained on: `trained_on`, the data section of its configuration. The default split is "test", and "all" for files
    without one: as far as we know, the model has seen none of it. Classes get the names that the model has for them.
    """
    recorded = trained_on.get("cache_dir")  # used while it exists
    cache_dir, names = Path(recorded) if recorded and Path(recorded).is_dir() else None, trained_on.get("class_names")
    options: dict[str, Any] = {"cache_dir": cache_dir, "class_names": Path(names) if isinstance(names, str) else names}
    if data is None and not trained_on:
        raise ValueError("this model doesn't say what it was trained on; name the images with --data")
    if root is None and "pipe:" in (command := str(trained_on.get("root"))) and str(data) != command:
        cure = f"if you trust it, add --data {shorten(command)!r}"
        raise ValueError(f"this model's file would start a program for its images; {cure}")
    if data is None or _is_same(str(data), trained_on):
        kept = {key: trained_on[key] for key in ("classes", "validation_fraction", "split_seed") if key in trained_on}
        return open_dataset(trained_on["name"], root=root or trained_on.get("root"), **options, **kept)
    if (kind := find_kind(data)) is None:
        sets = ", ".join(name for name in FINDERS if name not in _OWN_IMAGES)
        files = "no table (.csv, .jsonl, .parquet), no folder and no shards (.tar)"
        raise ValueError(f"--data {data} is no data set ({sets}), {files}")
    if kind not in _OWN_IMAGES:
        return open_dataset(kind, root=root, **options)
    dataset = open_dataset(kind, root=data, **options)
    return replace(dataset, default_split="test" if "test" in dataset.found else "all")


def _is_same(data: str, trained_on: Mapping[str, Any]) -> bool:
    if data in FINDERS:
        return data == trained_on.get("name")
    root = trained_on.get("root")
    return root is not None and Path(data).expanduser().resolve() == Path(root).expanduser().resolve()


def _stratified(source: ImageSource, fraction: float, salt: str) -> np.ndarray:
    """Mask [n] of a fraction of every class, at least one of two or more: the ids whose hashes rank lowest."""
    hashes = [hashlib.blake2b(f"{salt}:{name}".encode(errors="surrogateescape")) for name in source.ids]
    ranks = np.array([int.from_bytes(digest.digest()[:8], "big") for digest in hashes], dtype=np.uint64)
    sizes, mask = np.bincount(source.labels), np.zeros(len(source), dtype=bool)
    counts = np.minimum(np.maximum(np.rint(fraction * sizes), fraction > 0), sizes - 1)
    order = np.lexsort((ranks, source.labels))  # class by class
    place = np.arange(len(source)) - (np.cumsum(sizes) - sizes)[source.labels[order]]
    mask[order] = place < counts[source.labels[order]]
    return mask
