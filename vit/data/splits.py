"""The splits of a data set: those that it has of its own, and those that are held out of training.

What is missing is held out of the training images, stratified by class, by the rank of a hash of
(seed, id): adding images moves few others between splits. A validation folder without a test folder
(as in ImageNet) is the *test* split, and validation is held out of the training images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress

import numpy as np

from vit.data.class_names import (
    choose_classes,
    find_wordnet_names,
    name_classes,
    sort_class_names,
)
from vit.data.corrections import correct_labels
from vit.data.dataset import ImageDataset, ImageRule
from vit.data.groups import (
    MAX_COMPARED,
    choose_whole_groups,
    find_groups,
    hash_images,
    join_duplicates,
)
from vit.data.label_sets import count_labels, mark_labels
from vit.data.sources.base import Listing
from vit.runtime.arguments import check_choice, shorten

SPLITS = ("train", "validation", "test", "all")


@dataclass(frozen=True, eq=False, kw_only=True)
class DatasetSplits:
    """The splits of a data set. Those that it doesn't have are drawn when one is asked for,
    once."""

    # name for readers: that of a named set, or of the folder of own images
    title: str
    # all images, and the split of each, as text [n]
    images: ImageDataset
    marks: np.ndarray
    rule: ImageRule
    # how the list was read, and what wasn't, for the plan
    read: Sequence[str] = ()
    # class → its name in words, if it has another one
    renamed_classes: Mapping[str, str] = field(default_factory=dict)
    # the split that `split()` returns
    default_split: str = "test"
    # see `read_corrections`; splits stay as they were drawn
    corrections: Mapping[str, str] = field(default_factory=dict)
    # split → ids of its images, as they were held out in a training; None: they are drawn
    written: Mapping[str, Sequence[str]] | None = None
    # number of the training images of this training, None: not known
    num_trained_on: int | None = None
    # a sentence about each reason to keep images together
    _kept_together: list[str] = field(default_factory=list, init=False)

    @cached_property
    def own_splits(self) -> list[str]:
        """The splits that the data set has of its own."""
        return list(dict.fromkeys(self.marks.tolist()))

    def split(self, name: str | None = None) -> ImageDataset:
        """Return the images of "train", "validation", "test" or "all". Raises ValueError if the
        split is unknown, isn't there or would be empty."""
        name = name or self.default_split
        check_choice(name, SPLITS, name="split")
        own = self.own_splits
        if name == "all":
            dataset = replace(self.images, split=name)
        elif name in own and name != "train":
            dataset = replace(self._take(name), split=name)
        elif "train" in own and name in self._divided:
            dataset = self._divided[name]
        else:
            raise ValueError(
                f"the {name} split is empty ({self.title} has {', '.join(own)}): no image is held"
                " out for it, or all classes have too few; choose another split, add images, or"
                " give the split a folder"
            )
        return correct_labels(dataset, self.corrections)

    @property
    def pool(self) -> ImageDataset:
        """The images among which training and validation are, whatever is drawn: all but those of a
        test split that the data set has of its own."""
        return self.images.subset(np.flatnonzero(self.marks != "test"))

    def join_copies(self) -> "DatasetSplits":
        """Join the groups of all images by their copies and scenes, also those of a split that the
        data set has of its own, where `rule` asks for it."""
        return replace(self, images=self._group(self.images))

    @property
    def training_groups(self) -> set[str]:
        """The groups of the images of a model's training; empty if they aren't known."""
        held_out = set(chain.from_iterable((self.written or {}).values()))
        if self.num_trained_on is None:
            return set()
        is_trained_on = (self.marks == "train") & ~np.isin(self.images.ids, list(held_out))
        return set(compress(self.images.groups or (), is_trained_on))

    def describe_splits(self) -> list[str]:
        """Describe the origin of the test and the validation split, a sentence each."""
        sentences = []
        rest = "the training images"
        for split in ("test", "validation"):
            if split in self.own_splits:
                sentences.append(f"{split} is a split of the data")
            elif split in self._held_out and "train" in self.own_splits:
                percent = f"{100 * self._held_out[split]:g} %"
                sentences.append(f"{split} is {percent} of {rest} (seed {self.rule.split_seed})")
                rest = "the rest"
        return sentences + self._kept_together

    def list_held_out(self) -> dict[str, list[str]]:
        """List the ids of the images of each split that isn't the data set's own: split → ids."""
        held_out = self._held_out.keys() & self._divided.keys()
        return {split: list(self._divided[split].ids) for split in sorted(held_out)}

    @property
    def _held_out(self) -> dict[str, float]:
        """Split → the fraction of the remaining training images that is held out for it, the test
        split first: it doesn't depend on the fraction for validation."""
        fractions = {"test": self.rule.test_fraction, "validation": self.rule.validation_fraction}
        own = self.own_splits
        return {split: part for split, part in fractions.items() if part and split not in own}

    def _take(self, split: str) -> ImageDataset:
        return self.images.subset(np.flatnonzero(self.marks == split))

    @cached_property
    def _divided(self) -> dict[str, ImageDataset]:
        """The training images and what is held out of them, without empty splits."""
        rest = self._take("train")
        notes = list(rest.notes)
        if self.written is None:
            rest = self._group(rest)
            places = self._draw(rest)
        else:
            places = self._find_written(rest, self.written, notes)
        held_out = [place for own in places.values() for place in own]
        places["train"] = np.delete(np.arange(len(rest)), held_out)
        datasets = {split: rest.subset(own) for split, own in places.items() if len(own)}
        for split, dataset in datasets.items():
            is_missing = (rest.class_counts > 0) & (dataset.class_counts == 0)
            missing = [rest.class_names[label] for label in np.flatnonzero(is_missing).tolist()]
            if missing:
                notes.append(f"the {split} split has no image of {shorten(', '.join(missing))}")
        return {
            split: replace(dataset, split=split, notes=tuple(notes))
            for split, dataset in datasets.items()
        }

    def _find_written(
        self, rest: ImageDataset, written: Mapping[str, Sequence[str]], notes: list[str]
    ) -> dict[str, np.ndarray]:
        """Find the images that were held out in a training: split → their places, and count those
        that are new or missing in `notes`. Raises ValueError if none of a split is there."""
        place_of = {image_id: place for place, image_id in enumerate(rest.ids)}
        places = {}
        for split, ids in written.items():
            found = [place_of[image_id] for image_id in ids if image_id in place_of]
            places[split] = np.array(found, dtype=np.int64)
            text = f"{len(ids):,} {split} images of the training"
            if ids and not found:
                raise ValueError(
                    f"none of the {text} is among those of {self.title}, such as {shorten(ids[0])};"
                    " name other images with --data"
                )
            if len(found) < len(ids):
                notes.append(f"{len(ids) - len(found):,} of {text} are missing")
        if self.num_trained_on is not None:
            num_new = len(rest) - sum(map(len, places.values())) - self.num_trained_on
            state = "new" if num_new > 0 else "missing"
            if num_new:
                notes.append(f"{abs(num_new):,} training images are {state} since the training")
        return places

    def _draw(self, everything: ImageDataset) -> dict[str, np.ndarray]:
        """Draw the images that are held out: split → their places."""
        places = {}
        left = np.arange(len(everything))
        for number, (split, fraction) in enumerate(self._held_out.items()):
            rest = everything.subset(left)
            mask = choose_whole_groups(
                rest.groups or rest.ids,
                rest.strata,
                fraction=fraction,
                salt=f"{self.rule.split_seed}:{split}",
                # this split, those after it, and the training images
                num_splits=len(self._held_out) - number + 1,
            )
            places[split] = left[mask]
            left = left[~mask]
        return places

    def _group(self, dataset: ImageDataset) -> ImageDataset:
        """Join the groups of images by their copies and scenes."""
        if dataset.groups is not None:
            self._kept_together.append(f"{len(set(dataset.groups)):,} groups stay whole")
        if not self.rule.group_duplicates:
            return dataset
        if len(dataset) > MAX_COMPARED:
            self._kept_together.append(
                f"of more than {MAX_COMPARED:,} images, copies are found by their bytes alone, and"
                " near-copies and frames of one scene may be on both sides"
            )
        groups, num_copies, num_joined, num_alike = join_duplicates(
            dataset.groups or dataset.ids,
            dataset.strata,
            hash_images(dataset),
            # images that aren't split here may be divided into folds
            num_splits=max(1 + len(self._held_out), 2),
        )
        if num_alike:
            self._kept_together.append(
                f"{num_alike:,} images resemble so many others of their class (photos of one"
                " texture?) that near-copies among them may be on both sides"
            )
        if not num_copies:
            return dataset
        self._kept_together.append(
            f"{num_copies:,} images have a copy or a near-copy or show a scene of others:"
            f" {num_joined:,} scenes, each on one side"
        )
        return replace(dataset, groups=groups)


def number_listing(listing: Listing, rule: ImageRule, *, name: str, title: str) -> DatasetSplits:
    """Number the classes of a list, check them, and choose those that are kept. Raises ValueError
    if there are fewer than two classes, or one has no training images."""
    splits = np.array(listing.splits or ["train"] * len(listing.labels))
    are_sets = any(isinstance(label, tuple) for label in listing.labels)
    # labels of sets, or classes
    flat = chain.from_iterable(listing.labels) if are_sets else listing.labels
    names = tuple(listing.class_names or sort_class_names(flat))
    words = rule.class_names
    if words is None:
        words = find_wordnet_names(names)
    kept = names
    if rule.classes is not None:
        kept = choose_classes(
            names, rule.classes, name_classes(names, {**find_wordnet_names(names), **words})
        )
    chosen = np.arange(len(splits))
    if are_sets:
        labels = mark_labels(listing.labels, names)[:, np.isin(names, kept)]
    else:
        place_of = {name: place for place, name in enumerate(kept)}
        labels = np.array([place_of.get(label, -1) for label in listing.labels], dtype=np.int64)
        chosen = np.flatnonzero(labels >= 0)
    is_trained = np.ones(len(kept), dtype=bool)
    if "train" in splits:
        training = chosen[splits[chosen] == "train"]
        is_trained = count_labels(labels[training], len(kept)) > 0
        counts = count_labels(labels[chosen], len(kept))
        lacking = np.flatnonzero(~is_trained & (counts > 0)).tolist()
        # an image may have labels besides one that no training image has
        if lacking and not are_sets:
            is_wrong = labels == lacking[0]
            raise ValueError(
                f"{title}: class {shorten(kept[lacking[0]])!r} has {is_wrong.sum():,} images in the"
                f" {splits[is_wrong][0]} split and none in the train split; add some, or leave it"
                " out with data.classes"
            )
    if is_trained.sum() < 2:
        used = shorten(", ".join(repr(kept[place]) for place in np.flatnonzero(is_trained)))
        hint = "name the folder that holds the folders of classes, or add images of another class"
        if len(kept) < len(names):
            hint = "keep more of them in data.classes"
        raise ValueError(f"{title} has images of fewer than two classes: {used or 'none'}; {hint}")

    notes = list(listing.notes)
    if {"validation", "test"} & set(splits) == {"validation"} and not listing.keeps_validation:
        splits[splits == "validation"] = "test"
        notes.append("val is the test split; validation images are held out of the others")
    renamed = name_classes(kept, words) if words else {}
    images = ImageDataset(
        name=name,
        class_names=tuple(renamed.get(each, each) for each in kept),
        labels=labels,
        ids=listing.reader.names,
        reader=listing.reader,
        notes=tuple(notes),
        groups=listing.groups,
        rows=listing.rows,
    )
    # the images of one split after the other
    own_splits = dict.fromkeys(splits.tolist())
    chosen = np.concatenate([chosen[splits[chosen] == split] for split in own_splits])
    images = images.subset(chosen)
    if rule.group_by is not None:
        images = replace(images, groups=find_groups(images, rule.group_by))
    return DatasetSplits(
        title=title,
        images=images,
        marks=splits[chosen],
        rule=rule,
        read=listing.read,
        renamed_classes=renamed,
    )
