"""Labels of images in tables, shards and sets of Hugging Face: one class or several labels, their
numbers, and those that are missing or spelled in two ways."""

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from vit.data.class_names import (
    ClassChoice,
    check_labels,
    find_alike,
    number_labels,
    sort_class_names,
)
from vit.data.label_sets import are_several, mark_splits
from vit.runtime.arguments import shorten

_MISSING = ("nan", "none", "null", "n/a", "na", "#n/a", "#na", "nil", "?", "-", "--", "missing")
# characters between several labels in one value that names of classes rarely hold
_SEPARATORS = "|;\n,"
# characters that join the words of a name, too
_HYPHENS = (" ", " and ", "-", "_", ".", "'")
_TASK_HINT = "data.task=multilabel takes them as several labels"


def finds_several(
    paths: Sequence[str], values: Sequence[Any], task: str | None, guesses: list[str]
) -> bool:
    """Decide whether an image may have several labels, and add the reason to the guesses.

    Args:
        paths: The image of each row of all tables of a data set, as it is written.
        values: The labels of each row as they are written: a value of the column of labels; or a
            tuple, the columns that are 1.
        task: "classes" or "multilabel" if the user says so; None: by the labels themselves. Then a
            tenth of the images must have several labels, or none where there is a column for each;
            a few are taken for mistakes.
        guesses: Gets a phrase.
    """
    if task is not None:
        return task == "multilabel"
    texts = [value for value in values if isinstance(value, str)]
    counts = Counter(texts)
    reason = ""
    if any(isinstance(value, tuple) for value in values):
        num_others = sum(len(value) != 1 for value in values)
        reason = "several or none of the columns are 1 in {} rows"
    elif lists := [found for value in values if (found := _parse_list(value)) is not None]:
        # lists of one label may be a class in brackets, such as "[other]"
        num_others = sum(len(found) != 1 for found in lists)
        reason = "lists of several labels or none in {} rows"
    elif separator := _find_separator(counts):
        num_others = sum(separator in text or not text for text in texts)
        reason = f"labels with {separator!r} between them in {{}} rows"
    else:
        pairs = {(path, str(value)) for path, value in zip(paths, values, strict=True)}
        images = Counter(path for path, _ in pairs)
        num_others = sum(count > 1 for count in images.values())
        reason = "rows with different labels for {} images"
        values = list(images)
    if not are_several(num_others, len(values)):
        return False
    guesses.append(f"several labels an image ({reason.format(f'{num_others:,}')})")
    return True


def _find_separator(counts: Counter[str], *, is_certain: bool = False) -> str:
    """Find the separator of several labels in one value; empty if there is none.

    The labels between them are classes of other images, all of one value or, for separators that
    names hardly hold, any of them; or they are common to several values.

    Args:
        counts: Values of the column.
        is_certain: There are several labels; then other signs and spaces may separate them.
    """
    if all(re.fullmatch(r"(\d+( +\d+)*)?", text) for text in counts):
        return " " * any(" " in text for text in counts)
    separators = _list_signs(counts) if is_certain else list(_SEPARATORS)
    for separator in separators:
        joined = [label for label in counts if separator in label]
        parts_of = [set(_split(label, [separator])) for label in joined]
        are_classes = any(parts and parts <= counts.keys() for parts in parts_of)
        common = Counter(part for parts in parts_of for part in parts)
        # names of classes hold a comma now and then, and hardly ever the others
        is_shared = separator in "|;\n" and any(
            part in counts or (len(joined) > 2 and count > 1) for part, count in common.items()
        )
        # tags are fewer than their combinations
        is_shared |= is_certain and len(common) < len(joined)
        if are_classes or is_shared:
            return separator
    if is_certain:
        return next((each for each in _SEPARATORS if any(each in text for text in counts)), "")
    return ""


def _list_signs(labels: Iterable[str]) -> list[str]:
    """List the signs in labels that may separate several, the likeliest first."""
    found = {sign for label in labels for sign in label if not sign.isalnum()} - {*_HYPHENS}
    others = sorted(found - {*_SEPARATORS, *'()[]{}"<>'})
    return [*_SEPARATORS, *others, *_HYPHENS]


def _split(text: str, separators: Collection[str]) -> list[str]:
    """Return the labels in a text that separators divide."""
    if not separators:
        return [text] if text else []
    parts = re.split("|".join(map(re.escape, separators)), text)
    return list(filter(None, map(str.strip, parts)))


def name_flags(values: Sequence[Any], class_names: Sequence[str] | None = None) -> Sequence[Any]:
    """Return rows of 0 and 1, one number for each label, as the names of those that are 1; other
    values as they are.

    Args:
        values: Labels of each image.
        class_names: Names of the labels. None: "class 0" and so on.
    """
    if not all(isinstance(value, list | tuple) or str(value)[:1] in ("[", "{") for value in values):
        return values
    lists = [_parse_list(value) for value in values]
    lengths = {-1 if each is None else len(each) for each in lists}
    if len(lengths) != 1 or min(lengths) < 2:
        return values
    (count,) = lengths
    names = class_names or [f"class {place}" for place in range(count)]
    if len(names) != count or not all(flag in (0, 1) for each in lists for flag in each or ()):
        return values
    return [tuple(names[place] for place, flag in enumerate(each or ()) if flag) for each in lists]


def _parse_list(value: Any) -> list[Any] | None:
    """Read a list of labels, also from the text of one: "['cat', 'dog']"; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\[.*\]|\{.*\}", value):
        # as JSON or as Python writes it
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
                value = read(value)
        if isinstance(value, str):
            value = [part.strip(" '\"") for part in value[1:-1].split(",")]
    if isinstance(value, list | tuple | set):
        # pandas makes whole numbers floating-point ones where a value is missing
        whole = [int(each) if isinstance(each, float) and each % 1 == 0 else each for each in value]
        if all(isinstance(each, str | int) for each in whole):
            return whole
    return None


def split_labels(values: Sequence[Any]) -> list[tuple[str, ...] | None]:
    """Return the labels in each value, without repetitions; None for a value that holds no labels.

    Args:
        values: See `finds_several`.
    """
    counts = Counter(
        value for value in values if isinstance(value, str) and _parse_list(value) is None
    )
    separators = list(filter(None, [_find_separator(counts, is_certain=True)]))
    if separators:
        # a table made of several may have several separators
        names = {name for text in counts for name in _split(text, separators)}
        for sign in _SEPARATORS:
            if any(sign in name and names.issuperset(_split(name, [sign])) for name in names):
                separators.append(sign)
    found: list[tuple[str, ...] | None] = []
    for value in values:
        parts = _parse_list(value)
        if parts is None and (value is None or isinstance(value, str | int)):
            parts = _split("" if value is None else str(value), separators)
        texts = None if parts is None else [str(part).strip() for part in parts]
        found.append(None if texts is None else tuple(dict.fromkeys(filter(None, texts))))
    return found


class LabelColumn(NamedTuple):
    """The labels of all splits of a set that isn't a table.

    Attributes:
        several: An image may have several labels.
        labels: Split → the class of each image as it is written, or the names of its labels.
        notes: Warnings for the user.
        guesses: How the labels were read, for the user.
    """

    several: bool
    labels: Mapping[str, Sequence[Any]]
    notes: Sequence[str]
    guesses: Sequence[str]


def find_label_column(
    values: Mapping[str, Sequence[Any]],
    class_names: Sequence[str] | None,
    *,
    task: str | None,
    origin: str,
) -> LabelColumn:
    """Read the labels of images that may have several.

    Args:
        values: Split → labels of its images, each a list, a text or a number.
        class_names: Names of labels that are numbers. None: the labels themselves.
        task: See `vit.data.dataset.LabelRule`.
        origin: Name of the data, at the start of messages.

    Raises:
        ValueError: A value holds no labels, or a number in a list has no name.
    """
    everything = name_flags([value for each in values.values() for value in each], class_names)
    if class_names and task != "classes":
        everything = [_name_numbers(value, class_names, origin) for value in everything]
    guesses: list[str] = []
    notes: list[str] = []
    paths = list(map(str, range(len(everything))))
    several = finds_several(paths, everything, task, guesses)
    labels = list(map(take_class, everything))
    if several:
        labels = list[Any](split_labels(everything))
        if None in labels:
            wrong = shorten(repr(everything[labels.index(None)]), 60)
            hint = "write names, with | between them"
            raise ValueError(f"{origin}: {wrong} is not a list of labels; {hint}")
        notes = find_oddities(list(chain.from_iterable(labels)), several=True)
    remaining = iter(labels)
    by_split = {split: list(islice(remaining, len(each))) for split, each in values.items()}
    return LabelColumn(several, by_split, notes, guesses)


def number_splits(
    labels: Mapping[str, Sequence[Any]],
    classes: ClassChoice,
    *,
    class_names: Sequence[str] | None = None,
    origin: str,
) -> tuple[tuple[str, ...], dict[str, np.ndarray], list[str]]:
    """Number the classes of the images of each split, or mark their labels.

    Args:
        labels: Split → the class of each image, a text or a number; or the names of its labels, a
            tuple.
        classes: Classes that are kept; None keeps all.
        class_names: Names of all labels. None: those that occur.
        origin: Name of the data, at the start of messages.

    Returns:
        The names in order; split → class of each image, int64 [n], or which labels it has,
        bool [n, C]; and warnings for the user.

    Raises:
        ValueError: See `check_labels` and `mark_splits`.
    """
    everything = [label for each in labels.values() for label in each]
    if any(isinstance(label, tuple) for label in everything):
        names = tuple(class_names or sort_class_names(chain.from_iterable(everything)))
        return names, *mark_splits(labels, names, origin=origin)
    texts = {split: list(map(str, each)) for split, each in labels.items()}
    names = sort_class_names(map(str, everything))
    check_labels(texts, names, classes, origin=origin)
    return names, {split: number_labels(each, names) for split, each in texts.items()}, []


def _name_numbers(value: Any, class_names: Sequence[str], origin: str) -> Any:
    """Return the names of labels that are numbers, in a list; other values as they are."""
    labels = _parse_list(value)
    if labels is None:
        return value
    for label in labels:
        is_known = label in class_names
        if isinstance(label, int):
            is_known = 0 <= label < len(class_names)
        if not is_known:
            text = f"label {shorten(str(label))} is not one of the {len(class_names)} labels"
            raise ValueError(f"{origin}: {text}; correct it, or remove the row")
    return [class_names[label] if isinstance(label, int) else label for label in labels]


def take_class(value: Any) -> Any:
    """Return the class of an image that is the only one in a list; other values as they are."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def tidy_numbers(labels: Sequence[Any]) -> tuple[Sequence[Any], list[str]]:
    """Write whole numbers without ".0", which pandas adds to a column with gaps, if all labels are
    whole numbers.

    Returns:
        The labels, and a phrase about the change, if there is one.
    """
    texts = [label for label in labels if isinstance(label, str)]
    if all(re.fullmatch(r"-?\d+(\.0+)?", text) for text in texts) and "." in "".join(texts):
        labels = [label.partition(".")[0] if isinstance(label, str) else label for label in labels]
        return labels, ["classes without .0"]
    return labels, []


def check_several(labels: Sequence[str], *, origin: str) -> list[str]:
    """Look for several labels in one value, such as "cat|dog".

    Returns:
        Sentences for the user, where it may be so.

    Raises:
        ValueError: The values between separators are classes themselves.
    """
    counts = Counter(labels)
    signs = [sign for sign in _list_signs(counts) if sign not in _HYPHENS]

    def is_joined(label: str, separators: Sequence[str]) -> bool:
        return any(
            separator in label
            and all(part.strip() in counts and part != label for part in label.split(separator))
            for separator in separators
        )

    several = [
        label
        for label in counts
        if re.fullmatch(r"\[.*\]|\{.*\}", label) or is_joined(label, signs)
    ]
    if several:
        total = sum(counts[label] for label in several)
        raise ValueError(
            f"{origin}: {total:,} images have several labels, such as {shorten(several[0], 60)!r}; "
            f"keep one label, leave these images out, or {_TASK_HINT}"
        )
    notes = []
    doubtful = [label for label in counts if is_joined(label, _HYPHENS)]
    if doubtful:
        examples = shorten(", ".join(map(repr, doubtful)))
        notes.append(f"{examples} may be several labels in one; they are classes of their own")
    # no part occurs alone, and the same parts occur in many classes
    for separator in (*signs, " "):
        joined = [label for label in counts if separator in label]
        parts_of = Counter(part.strip() for label in joined for part in label.split(separator))
        total = sum(counts[label] for label in joined)
        is_common = total > len(labels) / 2 and len(joined) > 2
        # names of two words share some of them; tags are fewer than their combinations
        is_common &= separator != " " or len(parts_of) < len(joined)
        is_common &= sum(count > 1 for count in parts_of.values()) > 1
        # names hardly hold these, and a part of a name is seldom a class
        is_common |= bool(joined) and separator in "|;\n"
        is_common |= separator == "," and any(part in counts for part in parts_of)
        if is_common:
            text = f"{len(joined)} classes hold {separator!r}, such as {shorten(joined[0], 60)!r}"
            notes.append(f"{text}: if these are several labels, {_TASK_HINT}")
    return notes


def find_oddities(labels: Sequence[str], *, several: bool = False) -> list[str]:
    """Write a sentence about labels that look missing, and about classes whose names differ in
    small and large letters alone, or as numbers in zeros alone.

    Args:
        labels: The class of each image, or all labels of all images.
        several: An image may have several labels.
    """
    counts = Counter(labels)
    notes = []
    missing = {label: count for label, count in counts.items() if label.casefold() in _MISSING}
    if missing:
        text = ", ".join(f"{label!r} {count:,}" for label, count in missing.items())
        kind, remedy = "classes", "remove their rows if they are"
        if several:
            kind, remedy = "labels of their own", "leave the value empty if the image has no label"
        notes.append(f"labels that look missing are {kind}: {text}; {remedy}")
    for names in find_alike(counts):
        text = ", ".join(f"{name!r} {counts[name]:,}" for name in names)
        word = "labels" if several else "classes"
        notes.append(f"{word} that differ in case or zeros alone: {text}; write them alike")
    return notes
