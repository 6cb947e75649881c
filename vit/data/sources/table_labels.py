"""Labels of a table's rows: those that are missing, spelled in two ways or several in one are
found before a model is trained on them."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vit.data.class_names import find_alike
from vit.runtime.arguments import shorten

_MISSING = ("nan", "none", "null", "n/a", "na", "#n/a", "#na", "nil", "?", "-", "--", "missing")
# characters between several labels in one value; refused where each of them is a class
_SEPARATORS = "|;,+&/"


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
            "an image has one class: keep one label, or leave these images out"
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
            notes.append(f"{text}: if these are several labels, keep one of them for each image")
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
