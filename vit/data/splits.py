"""The splits of a data set: those that it has of its own, and those that are held out of training.

A split with a folder of its own is that folder. What is missing is held out of the training images,
stratified by class, by the rank of a hash of (seed, id): adding images moves few others between
splits. A validation folder without a test folder (as in ImageNet) is the *test* split, and
validation is held out of the training images.
"""

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vit.data.class_names import find_wordnet_names, resolve_class_names
from vit.data.corrections import SEPARATOR, correct_labels
from vit.data.dataset import ImageDataset, SourceSplits, printable
from vit.data.groups import (
    MAX_COMPARED,
    choose_whole_groups,
    count_contradictions,
    find_groups,
    hash_quickly,
    join_duplicates,
)
from vit.data.sources.base import describe_counts
from vit.runtime.arguments import check_choice, shorten
from vit.runtime.files import write_text
from vit.runtime.patterns import check_pattern

SPLITS = ("train", "validation", "test", "all")
# classes that are all counted for the user; of more, so many of the smallest and of the largest
_MAX_CLASSES = 20
_NUM_EXTREMES = 3


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How splits that a data set doesn't have are drawn from its training images.

    Args:
        validation_fraction: Fraction of the training images for validation.
        test_fraction: Fraction of all images for the test.
        split_seed: Seed of the choice of images.
        group_by: Property that images of one group share, see `vit.data.groups.find_groups`; None
            keeps the groups that a table has.
        group_duplicates: Keep copies of an image, and images nearly the same, on one side.

    Raises:
        ValueError: `group_by` is a wrong regular expression.
    """

    validation_fraction: float = 0.1
    test_fraction: float = 0.2
    split_seed: int = 0
    group_by: int | str | None = None
    group_duplicates: bool = False

    def __post_init__(self) -> None:
        # before images are listed
        if isinstance(self.group_by, str) and not self.group_by.isdecimal():
            check_pattern(self.group_by, name="data.group_by")


@dataclass(frozen=True, eq=False)
class DatasetSplits:
    """The splits of a data set, whose images are listed when a split is asked for, once.

    Attributes:
        name: The data.name.
        source: The splits that the set has of its own; the others are held out of "train".
        rule: How the others are drawn.
        cache_dir: Folder of decoded images.
        default_split: Name of the split that `split()` returns.
        title: Name for readers: that of a named set, or of the folder of own images.
        class_names: Other names of the classes, see `data.class_names` in docs/guides/data.md.
        corrections: Id of an image → its right class or labels, see `read_corrections`. Splits stay
            as they were drawn.
        written: Split → ids of its images, as they were held out in a training; None: they are
            drawn. See `RecordedImages`.
        unit: Word for what is counted in `describe_files`; empty for a published set.
        renamed_classes: Class → its other name, in the splits that were listed.
    """

    name: str
    source: SourceSplits
    rule: SplitRule
    cache_dir: Path
    default_split: str = "test"
    title: str = ""
    class_names: Path | Mapping[str, str] | None = None
    corrections: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Sequence[str]] | None = None
    unit: str = ""
    renamed_classes: dict[str, str] = field(default_factory=dict, init=False)
    _listed: dict[str, ImageDataset] = field(default_factory=dict, init=False)
    # a sentence about each reason to keep images together
    _kept_together: list[str] = field(default_factory=list, init=False)

    def split(self, name: str | None = None) -> ImageDataset:
        """Return the images of a split.

        Args:
            name: "train", "validation", "test" or "all"; None is `default_split`.

        Raises:
            ValueError: The split is unknown, isn't there or would be empty.
        """
        dataset = self._find_split(name or self.default_split)
        if not self.corrections:
            return dataset
        # a correction may use a class's own name or its other one
        corrections = dict(self.corrections)
        for image, label in corrections.items():
            names = label.split(SEPARATOR) if dataset.is_multilabel else [label]
            corrections[image] = SEPARATOR.join(
                self.renamed_classes.get(name, name) for name in names
            )
        return correct_labels(dataset, corrections)

    def _find_split(self, split: str) -> ImageDataset:
        source_splits = self.source.origins
        check_choice(split, SPLITS, name="split")
        if split in self._listed:
            return self._listed[split]

        # a split that is held out is listed together with the rest of the training images
        if split == "all" or (split in source_splits and split != "train"):
            self._listed[split] = replace(self._load(split), split=split)
        elif "train" not in source_splits:
            have = ", ".join(source_splits)
            raise ValueError(f"{self.name} has no {split} split, only {have}; choose one of these")
        else:
            self._hold_out()

        if split not in self._listed:
            rest = self._listed["train"]
            text = f"none of {len(rest):,} images are held out for it; choose another one"
            if self._held_out[split]:
                text = f"all classes have too few images (such as {rest.class_names[0]!r})"
                text += "; add images, or give the split a folder"
            raise ValueError(f"the {split} split is empty: {text}")
        return self._listed[split]

    def describe_splits(self) -> list[str]:
        """Describe the origin of the test and the validation split, a sentence each."""
        origins = self.source.origins
        rest = origins.get("train", "")
        sentences = []
        for split in ("test", "validation"):
            if split in origins:
                sentences.append(f"{origins[split]} is the {split} split")
            elif rest and self._held_out[split]:
                percent = f"{100 * self._held_out[split]:g} %"
                sentences.append(f"{split} is {percent} of {rest} (seed {self.rule.split_seed})")
                rest = "the rest"
        return sentences + self._kept_together

    def describe_classes(self) -> str:
        """Count the images of each class in each split, and their groups; of many classes, the
        smallest and the largest. Splits of a published set that aren't read yet are left out."""
        names = [
            name
            for name in ("train", "validation", "test")
            if name in self._listed or (self.unit and name in self.source.origins)
        ]
        datasets = [self.split(name) for name in names]
        class_names = datasets[0].class_names
        counts = np.array([dataset.class_counts for dataset in datasets])
        order = list(range(len(class_names)))
        if len(order) > _MAX_CLASSES:
            by_size = np.argsort(counts.sum(axis=0), kind="stable").tolist()
            order = [*by_size[:_NUM_EXTREMES], *by_size[-_NUM_EXTREMES:]]
        has_groups = all(dataset.groups is not None for dataset in datasets)
        parts = []
        for label in order:
            text = f"{class_names[label]} {'/'.join(map(str, counts[:, label]))}"
            if has_groups:
                groups = [dataset.count_groups(label) for dataset in datasets]
                text += f" ({'/'.join(map(str, groups))} group{'s' * (sum(groups) != 1)})"
            parts.append(text)
        if len(order) < len(class_names):
            parts.insert(_NUM_EXTREMES, "…")
        return f"{', '.join(parts)} ({'/'.join(names)})"

    def describe_files(self, num_unreadable: int = 0) -> str:
        """Count the images that were found and the files that are not used.

        Args:
            num_unreadable: Number of images that can't be read.

        Returns:
            A sentence; empty for a published set.
        """
        if not self.unit:
            return ""
        datasets = [self._load(split) for split in self.source.origins]
        unused = Counter(self.source.unused)
        for dataset in datasets:
            unused.update(dataset.unused)
        num_images = sum(map(len, datasets)) - num_unreadable

        # names without a space are suffixes; the others are descriptions
        others = {name: count for name, count in unused.items() if " " not in name}
        first = datasets[0]
        preposition = "with" if first.is_multilabel else "in"
        parts = [
            f"{num_images:,} images {preposition} {len(first.class_names):,} {first.class_word}"
        ]
        if num_unreadable:
            parts.append(f"{num_unreadable:,} unreadable")
        if others:
            parts.append(f"{sum(others.values()):,} not images: {describe_counts(others)}")
        if len(others) < len(unused):
            rest = {name: count for name, count in unused.items() if name not in others}
            parts.append(f"{sum(rest.values()):,} not used: {describe_counts(rest)}")
        num_files = num_images + num_unreadable + sum(unused.values())
        return f"{num_files:,} {self.unit}: {', '.join(parts)}"

    @property
    def _held_out(self) -> dict[str, float]:
        """Split → the fraction of the remaining training images that is held out for it."""
        fractions = {
            "test": self.rule.test_fraction,
            "validation": self.rule.validation_fraction,
        }
        return {
            split: part for split, part in fractions.items() if split not in self.source.origins
        }

    def _load(self, split: str) -> ImageDataset:
        """A split that the data set has of its own."""
        dataset = self.source.load(split)
        if self.rule.group_by is not None:
            groups = find_groups(dataset, self.rule.group_by, is_divided=split == "train")
            dataset = replace(dataset, groups=groups)
        source = self.class_names
        if source is None:
            source = find_wordnet_names(dataset.class_names)
        if not source:
            return dataset
        names = resolve_class_names(dataset.class_names, source)
        self.renamed_classes.update(zip(dataset.class_names, names, strict=True))
        return replace(dataset, class_names=names)

    def list_held_out(self) -> dict[str, list[str]]:
        """List the ids of the images of each split that isn't the data set's own: split → ids."""
        held_out = [split for split, fraction in self._held_out.items() if fraction]
        return {split: list(self._find_split(split).ids) for split in held_out}

    def _take_written(self, written: Mapping[str, Sequence[str]]) -> None:
        """Divide the images as they were divided in a training. Images that are new or missing are
        counted in a note. Raises ValueError if none of a split is there."""
        rest = self._load("train")
        places = {image_id: index for index, image_id in enumerate(rest.ids)}
        is_taken = np.zeros(len(rest), dtype=bool)
        for split, ids in written.items():
            found = [places[image_id] for image_id in ids if image_id in places]
            if not found and ids:
                raise ValueError(
                    f"none of the {len(ids):,} {split} images of the training is among those of"
                    f" {self.title or self.name}, such as {shorten(ids[0])}; name other images with"
                    " --data"
                )
            notes = rest.notes
            if len(found) < len(ids):
                text = f"{len(ids) - len(found):,} of {len(ids):,} {split} images of the training"
                notes = (*notes, f"{text} are missing")
            dataset = replace(rest.subset(found), split=split, notes=notes)
            self._listed[split] = dataset
            is_taken[found] = True
        self._listed["train"] = replace(rest.subset(np.flatnonzero(~is_taken)), split="train")

    def _hold_out(self) -> None:
        if self.written is not None:
            self._take_written(self.written)
            return
        # the test split first: it doesn't depend on the fraction for validation
        rest = self._load("train")
        num_splits = 1 + sum(fraction > 0 for fraction in self._held_out.values())
        counts = dict(zip(rest.class_names, rest.class_counts.tolist(), strict=True))
        few = {name: count for name, count in counts.items() if count < num_splits}
        notes = list(rest.notes)
        groups = self._group_images(rest, num_splits, notes)
        if few and groups is None:
            text = f"{len(few)} of {len(counts)} {rest.class_word} have too few images for {num_splits} splits"
            notes.append(f"{text}: {shorten(describe_counts(few))}")
        rest = everything = replace(rest, groups=groups)
        drawn: dict[str, ImageDataset] = {}
        for split, fraction in self._held_out.items():
            salt = f"{self.rule.split_seed}:{split}"
            if rest.groups is None:
                mask = _choose_stratified(rest, fraction, salt=salt)
            else:
                mask = choose_whole_groups(
                    rest.groups, rest.strata, fraction=fraction, salt=salt, num_splits=num_splits
                )
                num_splits -= fraction > 0
            if mask.any():
                drawn[split] = rest.subset(np.flatnonzero(mask))
            rest = rest.subset(np.flatnonzero(~mask))
        if groups is not None:
            notes += [_describe_missing(everything, drawn[split], split) for split in drawn]
        for split, dataset in {**drawn, "train": rest}.items():
            self._listed[split] = replace(dataset, split=split, notes=tuple(filter(None, notes)))

    def _group_images(
        self, dataset: ImageDataset, num_splits: int, notes: list[str]
    ) -> Sequence[str] | None:
        """Find the groups of the images that splits are drawn from, and add to the notes."""
        groups = dataset.groups
        if groups is not None:
            self._kept_together.append(f"{len(set(groups)):,} groups stay whole")
        if not self.rule.group_duplicates:
            return groups
        hashes = hash_quickly(dataset, self.cache_dir, title="rest")
        if num_images := count_contradictions(dataset.strata, hashes[0]):
            text = f"{num_images:,} images are in two classes, with the same pixels"
            if dataset.is_multilabel:
                text = f"{num_images:,} images have other labels than their copies"
            notes.append(f"{text}; keep each image in one (vit audit names them)")
        joined = join_duplicates(
            groups or dataset.ids,
            dataset.strata,
            hashes,
            # images that aren't split here may be divided into folds
            num_splits=max(num_splits, 2),
        )
        if len(dataset) > MAX_COMPARED:
            self._kept_together.append(
                f"of more than {MAX_COMPARED:,} images, copies are found by the bytes of their files"
                " alone, and near-copies may be on both sides"
            )
        if joined.num_alike:
            self._kept_together.append(
                f"{joined.num_alike:,} images resemble so many others of their class (photos of one"
                " texture?) that near-copies among them may be on both sides"
            )
        # without copies, the splits are those without `group_duplicates`
        if not joined.num_copies:
            return groups
        self._kept_together.append(
            f"{joined.num_copies:,} images have a copy or a near-copy, which is on the same side"
        )
        return joined.groups


def write_splits(path: Path, held_out: Mapping[str, Sequence[str]]) -> None:
    """Write the ids of the images that are held out of training as a table (path, split)."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["path", "split"])
    table.writerows([printable(name), split] for split, ids in held_out.items() for name in ids)
    write_text(path, text.getvalue())


def _describe_missing(everything: ImageDataset, drawn: ImageDataset, split: str) -> str:
    """Name the classes of which a split has no image in a sentence; empty if there are none."""
    missing = np.flatnonzero((everything.class_counts > 0) & (drawn.class_counts == 0)).tolist()
    counts = {label: everything.count_groups(label) for label in missing}
    names = [
        f"{everything.class_names[label]} ({count} group{'s' * (count != 1)})"
        for label, count in counts.items()
    ]
    return f"the {split} split has no image of {shorten(', '.join(names))}" if names else ""


def _choose_stratified(dataset: ImageDataset, fraction: float, *, salt: str) -> np.ndarray:
    """Choose a fraction of every class: the images whose hashes of (salt, id) rank lowest.

    Returns:
        Mask, bool [n]. At least one image of every class that has two or more.
    """
    texts = (f"{salt}:{name}" for name in dataset.ids)
    digests = (hashlib.blake2b(text.encode(errors="surrogateescape")).digest() for text in texts)
    ranks = np.array([int.from_bytes(digest[:8], "big") for digest in digests], dtype=np.uint64)

    # at least one image, but never all of a class
    strata = dataset.strata
    class_sizes = np.bincount(strata)
    num_chosen = np.maximum(np.rint(fraction * class_sizes), fraction > 0)
    num_chosen = np.minimum(num_chosen, class_sizes - 1)

    # sorted by class, then by rank
    order = np.lexsort((ranks, strata))
    labels = strata[order]
    class_starts = np.cumsum(class_sizes) - class_sizes
    rank_in_class = np.arange(len(dataset)) - class_starts[labels]

    mask = np.zeros(len(dataset), dtype=bool)
    mask[order] = rank_in_class < num_chosen[labels]
    return mask
