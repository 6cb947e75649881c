"""Labels of a table's rows: one class or several labels, and those that are missing or spelled in
two ways."""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from vit.data.class_names import find_alike
from vit.data.label_sets import are_several
from vit.runtime.arguments import shorten

_MISSING = ("nan", "none", "null", "n/a", "na", "#n/a", "#na", "nil", "?", "-", "--", "missing")
# characters between several labels in one value
_SEPARATORS = "|;,+&/"
# separators that names of classes rarely hold
_SURE_SEPARATORS = "|;,"
_TASK_HINT = "data.task=multilabel takes them as several labels"


class Cells(NamedTuple):
    """The labels of a table's rows as they are written.

    Attributes:
        paths: The image of each row, as it is written.
        values: A value of the column of labels; or a tuple, the columns that are 1.
    """

    paths: Sequence[str]
    values: Sequence[Any]


def finds_several(cells: Cells, task: str | None, guesses: list[str]) -> bool:
    """Decide whether an image may have several labels, and add the reason to the guesses.

    Args:
        cells: The rows of all tables of a data set.
        task: "classes" or "multilabel" if the user says so; None: by the labels themselves. Then a
            tenth of the images must have several labels, or none where there is a column for each;
            a few are taken for mistakes.
        guesses: Gets a phrase.
    """
    if task is not None:
        return task == "multilabel"
    values = cells.values
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
        num_others = sum(separator in text for text in texts)
        reason = f"labels with {separator!r} between them in {{}} rows"
    else:
        pairs = {(path, str(value)) for path, value in zip(cells.paths, values, strict=True)}
        images = Counter(path for path, _ in pairs)
        num_others = sum(count > 1 for count in images.values())
        reason = "rows with different labels for {} images"
        values = list(images)
    if not are_several(num_others, len(values)):
        return False
    guesses.append(f"several labels an image ({reason.format(f'{num_others:,}')})")
    return True


def _find_separator(counts: Counter[str]) -> str:
    """Find the separator of several labels in one value; empty if there is none for sure.

    The labels between them are classes of other images, all of one value or, for separators that
    names hardly hold, any of them; or they are common to several values.
    """
    for separator in _SURE_SEPARATORS:
        joined = [label for label in counts if separator in label]
        parts_of = [[part.strip() for part in label.split(separator)] for label in joined]
        are_classes = any(all(part in counts for part in parts) for parts in parts_of)
        common = Counter(part for parts in parts_of for part in set(parts))
        # names of classes hold a comma now and then, and hardly ever the others
        is_shared = separator != "," and any(
            part in counts or (len(joined) > 2 and count > 1) for part, count in common.items()
        )
        if are_classes or is_shared:
            return separator
    return ""


def _parse_list(value: Any) -> list[Any] | None:
    """Read a list of labels, also from the text of one: "['cat', 'dog']"; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"\[.*\]|\{.*\}", value):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value)
        if isinstance(value, str):
            value = [part.strip(" '\"") for part in value[1:-1].split(",")]
    if isinstance(value, list | tuple | set) and all(isinstance(each, str | int) for each in value):
        return list(value)
    return None


def split_labels(values: Sequence[Any]) -> list[tuple[str, ...] | None]:
    """Return the labels in each value, without repetitions; None for a value that holds no labels.

    Args:
        values: See `Cells`.
    """
    texts = [value for value in values if isinstance(value, str) and _parse_list(value) is None]
    separator = next((each for each in _SEPARATORS if any(each in text for text in texts)), None)
    found: list[tuple[str, ...] | None] = []
    for value in values:
        parts = _parse_list(value)
        if parts is None and (value is None or isinstance(value, str | int)):
            text = "" if value is None else str(value)
            parts = [part.strip() for part in text.split(separator)] if separator else [text]
        names = None if parts is None else [str(part) for part in parts if part not in ("", None)]
        found.append(None if names is None else tuple(dict.fromkeys(names)))
    return found


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

    def is_joined(label: str, separators: Sequence[str]) -> bool:
        return any(
            separator in label
            and all(part.strip() in counts and part != label for part in label.split(separator))
            for separator in separators
        )

    several = [
        label
        for label in counts
        if re.fullmatch(r"\[.*\]|\{.*\}", label) or is_joined(label, _SEPARATORS)
    ]
    if several:
        total = sum(counts[label] for label in several)
        raise ValueError(
            f"{origin}: {total:,} images have several labels, such as {shorten(several[0], 60)!r}; "
            f"keep one label, leave these images out, or {_TASK_HINT}"
        )
    notes = []
    doubtful = [label for label in counts if is_joined(label, (" ", " and "))]
    if doubtful:
        examples = shorten(", ".join(map(repr, doubtful)))
        notes.append(f"{examples} may be several labels in one; they are classes of their own")
    # no part occurs alone, and the same parts occur in many classes
    for separator in (*_SEPARATORS, " "):
        joined = [label for label in counts if separator in label]
        parts_of = Counter(part.strip() for label in joined for part in label.split(separator))
        total = sum(counts[label] for label in joined)
        is_common = total > len(labels) / 2 and len(joined) > 2
        # names of two words share some of them; tags are fewer than their combinations
        is_common &= separator != " " or len(parts_of) < len(joined)
        if is_common and sum(count > 1 for count in parts_of.values()) > 1:
            text = f"{len(joined)} classes hold {separator!r}, such as {shorten(joined[0], 60)!r}"
            notes.append(f"{text}: if these are several labels, {_TASK_HINT}")
    return notes


def find_oddities(labels: Sequence[str]) -> list[str]:
    """Write a sentence about labels that look missing, and about classes whose names differ in
    small and large letters alone, or as numbers in zeros alone."""
    counts = Counter(labels)
    notes = []
    missing = {label: count for label, count in counts.items() if label.casefold() in _MISSING}
    if missing:
        text = ", ".join(f"{label!r} {count:,}" for label, count in missing.items())
        notes.append(f"labels that look missing are classes: {text}; remove their rows if they are")
    for names in find_alike(counts):
        text = ", ".join(f"{name!r} {counts[name]:,}" for name in names)
        notes.append(f"classes that differ in case or zeros alone: {text}; write them alike")
    return notes
