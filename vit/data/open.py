"""The one door to images: the name of a data set, a folder, a table or shards → its splits.

A split with a folder of its own is that folder. What is missing is held out of the training images,
stratified by class, by the rank of a hash of (seed, id): adding images moves few others between
splits. A validation folder without a test folder (as in ImageNet) is the *test* split, and
validation is held out of the training images.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.corrections import correct_labels, read_corrections
from vit.data.dataset import ImageDataset, SourceSplits, join_datasets
from vit.data.groups import (
    MAX_COMPARED,
    choose_groups,
    find_groups,
    hash_quickly,
    join_duplicates,
)
from vit.data.sources import (
    folders,
    huggingface,
    named,
    remote,
    shards,
    tables,
    torchvision_sets,
)
from vit.data.sources.base import (
    Root,
    describe_counts,
    find_wordnet_names,
    read_words,
    resolve_class_names,
)
from vit.data.sources.python_objects import FROM_PYTHON, find_python_objects
from vit.runtime.arguments import HIDDEN, check_choice, hide_tokens, shorten
from vit.runtime.files import default_cache_dir

# data.name → what finds the splits of that set, from root, classes and cache_dir: a new data set is
# one line here
FINDERS: Mapping[str, Callable[..., SourceSplits]] = {
    "cifar10": partial(named.find_cifar, "cifar10"),
    "cifar100": partial(named.find_cifar, "cifar100"),
    "digits": named.find_digits,
    "folder": folders.find_folder,
    "huggingface": huggingface.find_huggingface,
    "imagenet": named.find_imagenet,
    "imagenette": named.find_imagenette,
    "webdataset": shards.find_shards,
    **torchvision_sets.FINDERS,
}
_NAMED_BY_ROOT = ("folder", "huggingface", "webdataset")
SPLITS = ("train", "validation", "test", "all")
# of the data section of a configuration: which images are in which split
_SPLIT_KEYS = (
    "classes",
    "validation_fraction",
    "test_fraction",
    "split_seed",
    "group_by",
    "group_duplicates",
)
# of the images, where a set has no test split of its own
TEST_FRACTION = 0.2


@dataclass(frozen=True, eq=False)
class DatasetSplits:
    """The splits of a data set, whose images are listed when a split is asked for, once.

    Attributes:
        name: the data.name.
        source: the splits that the set has of its own; the others are held out of "train".
        validation_fraction: of the training images, where there is no validation split.
        split_seed: which images are held out.
        cache_dir: of decoded images.
        default_split: the split that is meant where none is named.
        title: for readers: the name of a named set, or that of the folder of own images.
        test_fraction: of the images, where there is no test split.
        class_names: where the classes get other names, see `data.class_names` in docs/data.md.
        corrections: id of an image → the name of its right class; splits stay as they were drawn.
        check_cache: whether decoded images are found by the contents of their files.
        group_by: as of `vit.data.groups.find_groups`; None: the groups that a table has.
        group_duplicates: whether images that are the same, or nearly, count as of one group.
        renamed_classes: class → its other name, of the splits that were listed.
    """

    name: str
    source: SourceSplits
    validation_fraction: float
    split_seed: int
    cache_dir: Path
    default_split: str = "test"
    title: str = ""
    test_fraction: float = TEST_FRACTION
    class_names: Path | Mapping[str, str] | None = None
    corrections: Mapping[str, str] = field(default_factory=dict)
    check_cache: bool = False
    group_by: int | str | None = None
    group_duplicates: bool = False
    renamed_classes: dict[str, str] = field(default_factory=dict, init=False)
    _listed: dict[str, ImageDataset] = field(default_factory=dict, init=False)
    # what was kept together, a sentence each
    _kept_together: list[str] = field(default_factory=list, init=False)

    def split(self, name: str | None = None) -> ImageDataset:
        """The images of a split.

        Args:
            name: "train", "validation", "test" or "all"; None is `default_split`.

        Raises:
            ValueError: the split is unknown, isn't there or would be empty.
        """
        dataset = self._find_split(name or self.default_split)
        if not self.corrections:
            return dataset
        # of classes that have other names here, both are right
        corrections = {
            image: self.renamed_classes.get(label, label)
            for image, label in self.corrections.items()
        }
        return correct_labels(dataset, corrections)

    def _find_split(self, split: str) -> ImageDataset:
        source_splits = self.source.origins
        check_choice(split, SPLITS, name="split")
        if split in self._listed:
            return self._listed[split]

        # a split that is held out is listed together with the rest of the training images
        if split == "all":
            self._listed[split] = join_datasets([self._load(part) for part in source_splits])
        elif split in source_splits and split != "train":
            self._listed[split] = replace(self._load(split), split=split)
        elif "train" not in source_splits:
            raise ValueError(f"there is no {split} split here, only {', '.join(source_splits)}")
        else:
            self._hold_out()

        if split not in self._listed:
            rest = self._listed["train"]
            text = f"none of {len(rest):,} images are held out for it; choose another split, or other images"
            if self._held_out[split]:
                text = "every class has too few images for it: 1 is left for training"
                text += f", as of {rest.class_names[0]!r}; add some, or give it a folder"
            raise ValueError(f"the {split} split is empty: {text}")
        return self._listed[split]

    def describe_splits(self) -> list[str]:
        """What the test and the validation split are made of, a sentence each."""
        origins = self.source.origins
        rest = origins.get("train", "")
        sentences = []
        for split in ("test", "validation"):
            if split in origins:
                sentences.append(f"{origins[split]} is the {split} split")
            elif rest and self._held_out[split]:
                percent = f"{100 * self._held_out[split]:g} %"
                sentences.append(f"{split} is {percent} of {rest} (seed {self.split_seed})")
                rest = "the rest"
        return sentences + self._kept_together

    def describe_files(self, num_unreadable: int = 0) -> str:
        """How many files were found, and what they are; "" for a set that isn't files.

        Args:
            num_unreadable: images that can't be read.
        """
        if self.name not in (*_NAMED_BY_ROOT, "imagenet"):
            return ""
        datasets = [self._load(split) for split in self.source.origins]
        unused = Counter(self.source.unused)
        for dataset in datasets:
            unused.update(dataset.unused)
        num_images = sum(map(len, datasets)) - num_unreadable

        # suffixes, and what is said in words
        others = {name: count for name, count in unused.items() if " " not in name}
        parts = [f"{num_images:,} images in {len(datasets[0].class_names):,} classes"]
        if num_unreadable:
            parts.append(f"{num_unreadable:,} unreadable")
        if others:
            parts.append(f"{sum(others.values()):,} not images: {describe_counts(others)}")
        if len(others) < len(unused):
            rest = {name: count for name, count in unused.items() if name not in others}
            parts.append(f"{sum(rest.values()):,} not used: {describe_counts(rest)}")
        num_files = num_images + num_unreadable + sum(unused.values())
        noun = "rows" if self.name == "huggingface" else "files"
        return f"{num_files:,} {noun}: {', '.join(parts)}"

    @property
    def _held_out(self) -> dict[str, float]:
        """Split → the fraction of the remaining training images that is held out for it."""
        fractions = {"test": self.test_fraction, "validation": self.validation_fraction}
        source_splits = self.source.origins
        return {split: part for split, part in fractions.items() if split not in source_splits}

    def _load(self, split: str) -> ImageDataset:
        """A split that the data set has of its own."""
        dataset = self.source.load(split)
        if self.group_by is not None:
            dataset = replace(dataset, groups=find_groups(dataset, self.group_by))
        source = self.class_names
        if source is None:
            source = find_wordnet_names(dataset.class_names)
        if not source:
            return dataset
        names = resolve_class_names(dataset.class_names, source)
        self.renamed_classes.update(zip(dataset.class_names, names, strict=True))
        return replace(dataset, class_names=names)

    def _hold_out(self) -> None:
        # the test split first: it doesn't depend on the fraction for validation
        rest = self._load("train")
        num_splits = 1 + sum(fraction > 0 for fraction in self._held_out.values())
        counts = dict(zip(rest.class_names, np.bincount(rest.labels).tolist(), strict=False))
        few = {name: count for name, count in counts.items() if count < num_splits}
        if few:
            text = (
                f"{len(few)} of {len(counts)} classes have too few images for {num_splits} splits"
            )
            note = f"{text}: {shorten(describe_counts(few))}"
            rest = replace(rest, notes=(*rest.notes, note))
        rest = replace(rest, groups=self._group_images(rest, num_splits))
        for split, fraction in self._held_out.items():
            salt = f"{self.split_seed}:{split}"
            if rest.groups is None:
                mask = _choose_stratified(rest, fraction, salt=salt)
            else:
                mask = choose_groups(rest.groups, rest.labels, fraction=fraction, salt=salt)
            if mask.any():
                self._listed[split] = replace(rest.subset(np.flatnonzero(mask)), split=split)
            rest = rest.subset(np.flatnonzero(~mask))
        self._listed["train"] = replace(rest, split="train")

    def _group_images(self, dataset: ImageDataset, num_splits: int) -> Sequence[str] | None:
        """The groups of the images that splits are drawn from."""
        groups = dataset.groups
        if groups is not None:
            self._kept_together.append(f"{len(set(groups)):,} groups stay whole")
        if not self.group_duplicates or len(dataset) > MAX_COMPARED:
            return groups
        joined, num_copies = join_duplicates(
            groups or dataset.ids,
            dataset.labels,
            hash_quickly(dataset),
            # what isn't split here may be divided into folds
            num_splits=max(num_splits, 2),
        )
        # without any, splits are as they are without the question
        if not num_copies:
            return groups
        self._kept_together.append(
            f"{num_copies:,} images have a copy, or nearly, which is on the same side"
        )
        return joined


def open_dataset(
    name: str,
    *,
    root: Root = None,
    classes: Sequence[str] | None = None,
    class_names: Path | Mapping[str, str] | None = None,
    validation_fraction: float = 0.1,
    test_fraction: float = TEST_FRACTION,
    split_seed: int = 0,
    allow_outside: bool = False,
    corrections: Path | Mapping[str, str] | None = None,
    group_by: int | str | None = None,
    group_duplicates: bool = False,
    cache_dir: Path | None = None,
) -> DatasetSplits:
    """Find a data set by its name.

    Args:
        name: one of `FINDERS`.
        root: where the data is or goes.
        classes: those to keep, in the order of the set; None keeps all.
        class_names: their names in words, see `data.class_names` in docs/data.md.
        validation_fraction: of the training images, where there is no validation split.
        test_fraction: of the images, where there is no test split.
        split_seed: which images are held out.
        allow_outside: whether a table may name images outside its folder.
        corrections: id of an image → its right class, or a CSV file of them.
        group_by: what images of one group have in common, as of `vit.data.groups.find_groups`.
        group_duplicates: whether copies of an image are of one group.
        cache_dir: takes decoded images and downloads; None is $VIT_CACHE or ~/.cache/vit.

    Raises:
        ValueError: the name or a class is unknown.
        FileNotFoundError: the root is missing.
        OSError: a download fails.
    """
    if name == FROM_PYTHON:
        hint = "pass them as dataset=… again, or name other images with --data"
        raise ValueError(f"the images of this model were passed from Python; {hint}")
    check_choice(name, FINDERS, name="data.name")
    if root is None and name in (*_NAMED_BY_ROOT, "imagenet"):
        raise ValueError(f"data.name={name} needs data.root, where the images are")

    if class_names is not None and classes is not None:
        # classes may be named in words, too
        words = class_names if isinstance(class_names, Mapping) else read_words(class_names)
        class_of = {word: class_name for class_name, word in words.items()}
        classes = [class_of.get(word, word) for word in classes]

    cache_dir = cache_dir or default_cache_dir()
    find = FINDERS[name]
    if name == "folder":
        find = partial(find, allow_outside=allow_outside)
    source = find(root=root, classes=classes, cache_dir=cache_dir)
    # "all" and "train" are listed from the same folders, which are walked once
    source = source._replace(load=cache(source.load))

    if isinstance(corrections, Path):
        corrections = read_corrections(corrections)
    title = name
    if root and name in _NAMED_BY_ROOT:
        # of an address without its parameters
        title = Path(hide_tokens(str(root)).partition("?")[0]).expanduser().absolute().name
    return DatasetSplits(
        name,
        source,
        validation_fraction,
        split_seed,
        cache_dir,
        title=title,
        test_fraction=test_fraction,
        class_names=class_names,
        corrections=corrections or {},
        group_by=group_by,
        group_duplicates=group_duplicates,
    )


def find_kind(data: Path | str) -> str | None:
    """The `data.name` of a data set's name, or of what is at a path, pattern or "hf:NAME"; None for
    anything else."""
    text = str(data)
    path = Path(data).expanduser()
    is_torchvision = text.startswith(torchvision_sets.PREFIX)
    if is_torchvision or (text in FINDERS and text not in _NAMED_BY_ROOT):
        return text
    # a folder may be several of these: what is most particular comes first
    if remote.is_remote(text):
        return "webdataset"
    if text.startswith("hf:") or huggingface.is_dataset(path):
        return "huggingface"
    if ".tar" in text or (path.is_dir() and shards.list_shards(str(path))):
        return "webdataset"
    if tables.is_table(path) or path.is_dir():
        return "folder"
    return None


def open_for_model(
    data: Root, *, trained_on: Mapping[str, Any], root: Root = None
) -> DatasetSplits:
    """The data set on which a trained model is evaluated or explained.

    The default split is "test", and "all" for files without one: as far as we know, the model has
    seen none of it. Classes get the names that the model has for them.

    Args:
        data: the name of a data set, or what `find_kind` knows; None is what the model was trained
            on.
        trained_on: the data section of the model's configuration.
        root: where a data set of a name is.

    Raises:
        ValueError: there are no such images, or None is given for a model that names none.
    """
    if data is None and not trained_on:
        text = "this model doesn't say what it was trained on"
        raise ValueError(f"{text}; name the images with --data")

    # the cache of the training is used while it exists
    cache_dir = trained_on.get("cache_dir")
    if cache_dir is not None:
        cache_dir = Path(cache_dir) if Path(cache_dir).is_dir() else None
    class_names = trained_on.get("class_names")
    if isinstance(class_names, str):
        class_names = Path(class_names)
    corrections = trained_on.get("corrections")
    if isinstance(corrections, str):
        corrections = Path(corrections)
    open_named = partial(
        open_dataset,
        cache_dir=cache_dir,
        class_names=class_names,
        allow_outside=trained_on.get("allow_outside", False),
    )

    if data is None or _is_same(str(data), trained_on):
        # an address is saved without its token
        if data is not None and HIDDEN in str(trained_on.get("root")):
            root = root or data
        return open_named(
            trained_on["name"],
            root=root or trained_on.get("root"),
            corrections=corrections,
            **{key: trained_on[key] for key in _SPLIT_KEYS if key in trained_on},
        )

    kind = find_kind(data)
    if kind is None:
        names = ", ".join(name for name in FINDERS if name not in _NAMED_BY_ROOT)
        files = "a table (.csv, .jsonl, .parquet), a folder or shards (.tar)"
        raise ValueError(f"--data {data} is not a data set ({names}), {files}")
    if kind not in _NAMED_BY_ROOT:
        return open_named(kind, root=root)

    # own images are named by their root, and others lie at it
    splits = open_named(kind, root=data)
    default_split = "test" if "test" in splits.source.origins else "all"
    return replace(splits, default_split=default_split)


def open_passed(
    dataset: Any, *, class_names: Sequence[str] | None, model_classes: Sequence[str]
) -> DatasetSplits:
    """Images passed from Python to a trained model: the split "test", or of a pair "train" and
    "validation", which is the default then.

    Args:
        dataset: as of `find_python_objects`.
        class_names: its classes, where it doesn't name them.
        model_classes: those of the model, which labels count where nothing names them.

    Raises:
        ValueError: as `find_python_objects`.
    """
    source = find_python_objects(dataset, class_names, split="test", numbered_classes=model_classes)
    default_split = "test" if "test" in source.origins else "validation"
    return DatasetSplits(
        FROM_PYTHON,
        source,
        validation_fraction=0.0,
        split_seed=0,
        cache_dir=default_cache_dir(),
        default_split=default_split,
        title=FROM_PYTHON,
    )


def _is_same(data: str, trained_on: Mapping[str, Any]) -> bool:
    """Whether a model was trained on what `data` names."""
    if data in FINDERS:
        return data == trained_on.get("name")
    root = trained_on.get("root")
    if root is None:
        return False
    return Path(hide_tokens(data)).expanduser().resolve() == Path(root).expanduser().resolve()


def _choose_stratified(dataset: ImageDataset, fraction: float, *, salt: str) -> np.ndarray:
    """Mask, bool [n], of a fraction of every class, at least one image of two or more: those whose
    hashes of (salt, id) rank lowest."""
    texts = (f"{salt}:{name}" for name in dataset.ids)
    digests = (hashlib.blake2b(text.encode(errors="surrogateescape")).digest() for text in texts)
    ranks = np.array([int.from_bytes(digest[:8], "big") for digest in digests], dtype=np.uint64)

    # at least one image, but never all of a class
    class_sizes = np.bincount(dataset.labels)
    num_chosen = np.maximum(np.rint(fraction * class_sizes), fraction > 0)
    num_chosen = np.minimum(num_chosen, class_sizes - 1)

    # class by class, each by rank
    order = np.lexsort((ranks, dataset.labels))
    labels = dataset.labels[order]
    class_starts = np.cumsum(class_sizes) - class_sizes
    rank_in_class = np.arange(len(dataset)) - class_starts[labels]

    mask = np.zeros(len(dataset), dtype=bool)
    mask[order] = rank_in_class < num_chosen[labels]
    return mask
