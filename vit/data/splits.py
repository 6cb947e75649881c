"""The splits of a data set: those that it has of its own, and those that are held out of training.

What is missing is held out of the training images, stratified by class, by the rank of a hash of
(seed, id): adding images moves few others between splits. A validation folder without a test folder
(as in ImageNet) is the *test* split, and validation is held out of the training images.
"""

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vit.data.corrections import correct_labels
from vit.data.dataset import ImageDataset, printable
from vit.data.groups import choose_whole_groups, find_groups, group_copies
from vit.data.sources.listing import Images
from vit.runtime.arguments import check_choice, shorten
from vit.runtime.files import write_atomically
from vit.runtime.patterns import search_group

SPLITS = ("train", "validation", "test", "all")


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
            search_group(self.group_by, [], name="data.group_by")


@dataclass(frozen=True, eq=False)
class DatasetSplits:
    """The splits of a data set. Those that it doesn't have are drawn when one is asked for, once.

    Attributes:
        name: The data.name.
        images: All images, in the splits that the set has of its own.
        rule: How the others are drawn.
        cache_dir: Folder of decoded images.
        default_split: Name of the split that `split()` returns.
        title: Name for readers: that of a named set, or of the folder of own images.
        corrections: Id of an image → its right class or labels, see `read_corrections`. Splits stay
            as they were drawn.
        written: Split → ids of its images, as they were held out in a training; None: they are
            drawn. See `RecordedImages`.
        num_trained_on: Number of images that this training listed as its training images; None:
            not known.
    """

    name: str
    images: Images
    rule: SplitRule
    cache_dir: Path
    default_split: str = "test"
    title: str = ""
    corrections: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Sequence[str]] | None = None
    num_trained_on: int | None = None
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
        name = name or self.default_split
        own = self.images.own_splits
        check_choice(name, SPLITS, name="split")
        if name not in self._listed:
            if name == "all" or (name in own and name != "train"):
                self._listed[name] = replace(self._load(name), split=name)
            elif "train" in own:
                # listed together with the rest of the training images
                self._hold_out()
            else:
                text = f"{self.name} has no {name} split, only {', '.join(own)}"
                raise ValueError(f"{text}; choose one of these")
        if name not in self._listed:
            raise ValueError(
                f"the {name} split is empty: no image is held out for it, or all classes have too"
                " few; choose another split, add images, or give the split a folder"
            )
        return correct_labels(self._listed[name], self.corrections)

    def describe_splits(self) -> list[str]:
        """Describe the origin of the test and the validation split, a sentence each."""
        sentences = []
        rest = "the training images"
        for split in ("test", "validation"):
            fraction = self._held_out.get(split, 0)
            if split in self.images.own_splits:
                sentences.append(f"{split} is a split of the data")
            elif fraction and "train" in self.images.own_splits:
                seed = self.rule.split_seed
                sentences.append(f"{split} is {100 * fraction:g} % of {rest} (seed {seed})")
                rest = "the rest"
        return sentences + self._kept_together

    def list_held_out(self) -> dict[str, list[str]]:
        """List the ids of the images of each split that isn't the data set's own: split → ids."""
        held_out = [split for split, fraction in self._held_out.items() if fraction]
        return {split: list(self.split(split).ids) for split in held_out}

    @property
    def _held_out(self) -> dict[str, float]:
        """Split → the fraction of the remaining training images that is held out for it, the test
        split first: it doesn't depend on the fraction for validation."""
        fractions = {"test": self.rule.test_fraction, "validation": self.rule.validation_fraction}
        own = self.images.own_splits
        return {split: part for split, part in fractions.items() if split not in own}

    def _load(self, split: str) -> ImageDataset:
        """A split that the data set has of its own, with the groups of the rule."""
        dataset = self.images.split(split)
        if self.rule.group_by is None:
            return dataset
        return replace(dataset, groups=find_groups(dataset, self.rule.group_by))

    def _hold_out(self) -> None:
        """Divide the training images."""
        rest = self._load("train")
        notes = list(rest.notes)
        if self.written is None:
            rest = replace(rest, groups=self._group_images(rest))
            places = self._draw(rest)
        else:
            places = self._find_written(rest, self.written, notes)
        held_out = [place for own in places.values() for place in own]
        places["train"] = np.delete(np.arange(len(rest)), held_out)
        datasets = {split: rest.subset(own) for split, own in places.items()}
        for split, dataset in datasets.items():
            is_missing = (rest.class_counts > 0) & (dataset.class_counts == 0)
            missing = [rest.class_names[label] for label in np.flatnonzero(is_missing).tolist()]
            if missing and len(dataset):
                notes.append(f"the {split} split has no image of {shorten(', '.join(missing))}")
        for split, dataset in datasets.items():
            if len(dataset) or split == "train":
                self._listed[split] = replace(dataset, split=split, notes=tuple(notes))

    def _find_written(
        self, rest: ImageDataset, written: Mapping[str, Sequence[str]], notes: list[str]
    ) -> dict[str, np.ndarray]:
        """Find the images that were held out in a training: split → their places. Images that are
        new or missing are counted in a note. Raises ValueError if none of a split is there."""
        place_of = {image_id: place for place, image_id in enumerate(rest.ids)}
        places = {}
        for split, ids in written.items():
            found = [place_of[image_id] for image_id in ids if image_id in place_of]
            if not found and ids:
                raise ValueError(
                    f"none of the {len(ids):,} {split} images of the training is among those of"
                    f" {self.title or self.name}, such as {shorten(ids[0])}; name other images with"
                    " --data"
                )
            if len(found) < len(ids):
                text = f"{len(ids) - len(found):,} of {len(ids):,} {split} images of the training"
                notes.append(f"{text} are missing")
            places[split] = np.array(found, dtype=np.int64)
        if self.num_trained_on is not None:
            num_new = len(rest) - sum(map(len, places.values())) - self.num_trained_on
            state = "new" if num_new > 0 else "missing"
            if num_new:
                notes.append(f"{abs(num_new):,} training images are {state} since the training")
        return places

    def _draw(self, everything: ImageDataset) -> dict[str, np.ndarray]:
        """Draw the images that are held out: split → their places."""
        num_splits = 1 + sum(fraction > 0 for fraction in self._held_out.values())
        places = {}
        left = np.arange(len(everything))
        for split, fraction in self._held_out.items():
            rest = everything.subset(left)
            salt = f"{self.rule.split_seed}:{split}"
            if rest.groups is None:
                mask = _choose_stratified(rest, fraction, salt=salt)
            else:
                mask = choose_whole_groups(
                    rest.groups, rest.strata, fraction=fraction, salt=salt, num_splits=num_splits
                )
                num_splits -= fraction > 0
            places[split] = left[mask]
            left = left[~mask]
        return places

    def _group_images(self, dataset: ImageDataset) -> Sequence[str] | None:
        """Find the groups of the images that splits are drawn from."""
        if dataset.groups is not None:
            self._kept_together.append(f"{len(set(dataset.groups)):,} groups stay whole")
        if not self.rule.group_duplicates:
            return dataset.groups
        # images that aren't split here may be divided into folds
        num_splits = max(1 + sum(fraction > 0 for fraction in self._held_out.values()), 2)
        groups, reasons = group_copies(dataset, self.cache_dir, num_splits=num_splits)
        self._kept_together.extend(reasons)
        return groups


def write_splits(path: Path, held_out: Mapping[str, Sequence[str]]) -> None:
    """Write the ids of the images that are held out of training as a table (path, split)."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["path", "split"])
    table.writerows([printable(name), split] for split, ids in held_out.items() for name in ids)
    write_atomically(path, text.getvalue())


def _choose_stratified(dataset: ImageDataset, fraction: float, *, salt: str) -> np.ndarray:
    """Choose a fraction of every class: the images whose hashes of (salt, id) rank lowest.

    Returns:
        Mask, bool [n]. At least one image of every class that has two or more, never all.
    """
    texts = (f"{salt}:{name}" for name in dataset.ids)
    digests = (hashlib.blake2b(text.encode(errors="surrogateescape")).digest() for text in texts)
    ranks = np.array([int.from_bytes(digest[:8], "big") for digest in digests], dtype=np.uint64)
    mask = np.zeros(len(dataset), dtype=bool)
    strata = dataset.strata
    order = np.lexsort((ranks, strata))
    sizes = np.bincount(strata)
    for places in np.split(order, np.cumsum(sizes)[:-1]):
        num_chosen = max(np.rint(fraction * len(places)), fraction > 0)
        mask[places[: int(min(num_chosen, max(len(places) - 1, 0)))]] = True
    return mask
