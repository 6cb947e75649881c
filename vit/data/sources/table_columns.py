"""Columns of a table by their names and values: image files, classes, splits and groups."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vit.data.dataset import LabelRule
from vit.data.images import is_image_name
from vit.data.sources.base import SPLIT_OF
from vit.data.sources.table_text import Table
from vit.runtime.arguments import shorten

# names as `simplify` writes them, the best first
PATH_NAMES = (
    "path", "file_path", "filepath", "image_path", "imagepath", "img_path", "relative_path",
    "rel_path", "filename", "file_name", "fname", "file", "image_file", "image_filename",
    "image_name", "img_name", "imagename", "img_file", "image", "img", "photo", "picture",
    "image_index", "image_id", "img_id", "imageid", "imgid", "photo_id", "picture_id", "id",
)  # fmt: skip
LABEL_NAMES = (
    "label", "labels", "class", "class_name", "classname", "label_name", "category",
    "category_name", "species", "species_name", "target", "target_name", "lbl", "breed",
    "diagnosis", "dx", "finding_labels", "finding", "ground_truth", "groundtruth", "gt",
    "annotation", "tag", "class_label", "y", "class_id", "label_id", "category_id", "classid",
    "target_id",
)  # fmt: skip
# columns whose values are names of splits
_SPLIT_NAMES = (
    "set", "subset", "usage", "partition", "phase", "dataset", "data_set", "split_name",
    "train_test",
)  # fmt: skip
# columns that are true for the images of one split
_SPLIT_FLAGS = {
    **dict.fromkeys(("is_valid", "is_val", "is_validation"), "validation"),
    **dict.fromkeys(("is_test", "is_holdout"), "test"),
    "is_train": "train",
}
# names whose values have no certain meaning: "train" may also be a class of vehicles
_UNCLEAR_NAMES = (
    "fold", "folds", "kfold", "fold_id", "cv_fold", "train", "valid", "validation", "val", "test",
    "holdout",
)  # fmt: skip
_SPLIT_VALUES = SPLIT_OF | {"dev": "validation", "publictest": "validation", "privatetest": "test"}
_TRUE = ("true", "1", "yes", "1.0", "1,0", "t", "y")
_FALSE = ("false", "0", "no", "0.0", "0,0", "f", "n", "")
# rows that a column is tried on
_SAMPLE = 20


class Columns(NamedTuple):
    """Places of the columns that are read; None: there is no such column.

    Attributes:
        label: Column of the classes; None: the columns in `one_hot` are classes.
        one_hot: Columns of which one is 1 in each row.
        splits: Value of the column `split` → the split; None: values are checked row by row.
        guesses: How the columns were chosen, for the user.
        notes: Warnings for the user.
    """

    path: int
    label: int | None
    one_hot: tuple[int, ...]
    split: int | None
    splits: dict[str, str] | None
    group: int | None
    guesses: tuple[str, ...]
    notes: tuple[str, ...]


def simplify(name: Any) -> str:
    """Return the name of a column in small letters, with underscores for spaces and hyphens."""
    return re.sub(r"[\s._-]+", "_", str(name).strip().casefold()).strip("_")


def count_known(fields: Sequence[Any]) -> int:
    """Count the kinds of columns, image files and classes, that a row names."""
    names = {simplify(field) for field in fields}
    return (not names.isdisjoint(PATH_NAMES)) + (not names.isdisjoint(LABEL_NAMES))


def choose_columns(
    table: Table, rule: LabelRule, *, count_files: Callable[[Sequence[str]], int]
) -> Columns:
    """Choose the columns that are read.

    Args:
        table: The table.
        rule: Columns that the user names.
        count_files: Function that counts the values that name an image file.

    Raises:
        ValueError: Columns can't be told apart; the message lists them.
    """
    guesses: list[str] = []
    notes: list[str] = []
    if not table.rows and not table.short:
        raise ValueError(f"{table.path} holds no rows; write an image and its class into each")
    names = [simplify(column) for column in table.columns] or [""] * table.width
    path = _choose_path(table, names, rule.path_column, count_files, guesses)

    split, splits = _choose_split(table, names, guesses, notes)
    group = names.index("group") if "group" in names else None
    others = [place for place in range(len(names)) if place not in (path, split, group)]
    label = _choose_label(table, names, others, rule.label_column, guesses)
    one_hot = () if label is not None else _find_one_hot(table, others)
    if label is None and not one_hot:
        text = "no column is known to hold the classes"
        raise ValueError(_ask(table, text, "--label-column"))
    if one_hot:
        columns = shorten(", ".join(table.columns[place] for place in one_hot))
        guesses.append(f"one column for each class ({columns})")
    return Columns(path, label, one_hot, split, splits, group, tuple(guesses), tuple(notes))


def _ask(table: Table, text: str, option: str) -> str:
    """Write a message that asks for a column."""
    if not table.columns:
        return f"{table.path}: {text}; add a first line such as path,label"
    columns = shorten(", ".join(repr(column) for column in table.columns), 600)
    name = option.removeprefix("--").removesuffix("-column")
    hint = f"name the right one ({option} NAME), or call it {name}"
    return f"{table.path}: {text}; its columns are {columns}; {hint}"


def _find_named(table: Table, names: Sequence[str], column: str, option: str) -> int:
    """Find a column that the user names."""
    wanted = [place for place, name in enumerate(table.columns) if name == column.strip()]
    wanted = wanted or [place for place, name in enumerate(names) if name == simplify(column)]
    if len(wanted) != 1:
        text = "several columns" if wanted else "no column"
        raise ValueError(_ask(table, f"{text} {shorten(column)!r}", option))
    return wanted[0]


def _sample(table: Table, place: int) -> list[str]:
    """Return some values of a column."""
    step = max(1, len(table.rows) // _SAMPLE)
    return [str(fields[place]) for _, fields in table.rows[::step]][:_SAMPLE]


def _choose_path(
    table: Table,
    names: Sequence[str],
    column: str | None,
    count_files: Callable[[Sequence[str]], int],
    guesses: list[str],
) -> int:
    if column is not None:
        return _find_named(table, names, column, "--path-column")

    def holds_files(place: int) -> bool:
        values = _sample(table, place)
        return count_files(values) > len(values) / 2

    known = [place for name in PATH_NAMES for place, other in enumerate(names) if name == other]
    # any other column may hold the paths, too
    others = [place for place in range(len(names)) if place not in known]
    chosen = next(filter(holds_files, known), None)
    if chosen is None:
        # numbers may be names of files, too, and one file may be named by all rows
        with_files = list(filter(holds_files, others))
        best = max((_rate_paths(table, place) for place in with_files), default=None)
        with_files = [place for place in with_files if _rate_paths(table, place) == best]
        if len(with_files) > 1:
            columns = " and ".join(_describe(table, place) for place in with_files[:2])
            text = f"both {columns} may name the images"
            raise ValueError(_ask(table, text, "--path-column"))
        chosen = with_files[0] if with_files else None
    if chosen is None and known:
        # its rows are then reported
        chosen = known[0]
    if chosen is None:
        raise ValueError(_ask(table, "no column is known to name the images", "--path-column"))
    if names[chosen] != "path":
        guesses.append(f"image in {_describe(table, chosen)}")
    return chosen


def _rate_paths(table: Table, place: int) -> tuple[bool, bool]:
    """Rate how much a column looks like one of paths: by different values, then by suffixes."""
    values = _sample(table, place)
    return len(set(values)) > len(values) / 2, sum(map(is_image_name, values)) > len(values) / 2


def _describe(table: Table, place: int) -> str:
    return repr(table.columns[place]) if table.columns else f"column {place + 1}"


def _choose_label(
    table: Table,
    names: Sequence[str],
    others: Sequence[int],
    column: str | None,
    guesses: list[str],
) -> int | None:
    if column is not None:
        return _find_named(table, names, column, "--label-column")
    known = [place for name in LABEL_NAMES for place in others if names[place] == name]
    if not known:
        # two columns leave no choice
        filled = [place for place in others if names[place] or not table.columns]
        if len(filled) != 1:
            return None
        values = {str(fields[filled[0]]) for _, fields in table.rows}
        if len(values) > max(len(table.rows) / 2, 2):
            return None
        known = filled
    (label, *rest) = known
    if [names[place] for place in known].count(names[label]) > 1:
        text = f"several columns are called {table.columns[label]!r}"
        raise ValueError(f"{table.path}: {text}; rename the others")
    flags = _find_one_hot(table, others)
    if label in flags and all(
        sum(is_true(fields[place]) for place in flags) == 1 for _, fields in table.rows
    ):
        columns = shorten(", ".join(repr(table.columns[place]) for place in flags))
        text = f"{columns} may be one column for each class, or {table.columns[label]!r} all"
        raise ValueError(f"{table.path}: {text} classes; name it (--label-column) or rename it")
    different = [place for place in rest if not _are_equivalent(table, label, place)]
    # "label" is never something else; "class" may be one of biology
    if different and names[label] != "label":
        columns = " and ".join(repr(table.columns[place]) for place in (label, different[0]))
        raise ValueError(_ask(table, f"both {columns} may hold the classes", "--label-column"))
    # two columns may say the same: the one with words is taken
    if rest and not different and _is_numeric(table, label):
        label = next((place for place in rest if not _is_numeric(table, place)), label)
    if names[label] != "label" or rest:
        guesses.append(f"class in {_describe(table, label)}")
    return label


def _are_equivalent(table: Table, first: int, second: int) -> bool:
    """Return true if two columns divide the rows alike."""
    pairs = {(str(fields[first]), str(fields[second])) for _, fields in table.rows}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def _is_numeric(table: Table, place: int) -> bool:
    return all(re.fullmatch(r"-?[0-9.]+", value) for value in _sample(table, place))


def _choose_split(
    table: Table, names: Sequence[str], guesses: list[str], notes: list[str]
) -> tuple[int | None, dict[str, str] | None]:
    """Choose the column of the splits, and warn of others that look like one."""
    if "split" in names:
        return names.index("split"), None
    chosen: tuple[int | None, dict[str, str] | None] = (None, None)
    for place, name in enumerate(names):
        if name not in (*_SPLIT_NAMES, *_SPLIT_FLAGS, *_UNCLEAR_NAMES):
            continue
        values = {str(fields[place]).casefold() for _, fields in table.rows}
        splits: dict[str, str] = {}
        if values <= _SPLIT_VALUES.keys():
            splits = {value: _SPLIT_VALUES[value] for value in values}
        elif name in _SPLIT_FLAGS and values <= {*_TRUE, *_FALSE}:
            flagged = _SPLIT_FLAGS[name]
            rest = "test" if flagged == "train" else "train"
            splits = {value: flagged if value in _TRUE else rest for value in values}
        column = table.columns[place]
        if splits and chosen[0] is None:
            chosen = (place, splits)
            text = ", ".join(f"{shorten(value, 30)} is {splits[value]}" for value in sorted(values))
            guesses.append(f"split in {column!r} ({text})")
        # a column of many values is something else, such as a number
        elif len(values) <= _SAMPLE:
            known = shorten(", ".join(sorted(values)), 60)
            notes.append(
                f"the column {column!r} of {table.path.name} ({known}) looks like a split and is "
                "not used; call it split, with the values train, validation and test, to use it"
            )
    return chosen


def _find_one_hot(table: Table, others: Sequence[int]) -> tuple[int, ...]:
    """Find the columns that hold 0 or 1, if there are at least two."""
    counts = Counter[int]()
    for _, fields in table.rows:
        counts.update(place for place in others if is_flag(fields[place]))
    found = tuple(place for place in others if counts[place] == len(table.rows) > 0)
    return found if table.columns and len(found) >= 2 else ()


def is_flag(value: Any) -> bool:
    """Return true for a value of a one-hot column."""
    return value is not None and str(value).casefold() in {*_TRUE, *_FALSE} - {""}


def is_true(value: Any) -> bool:
    """Return true for the value of a one-hot column at the row's class."""
    return str(value).casefold() in _TRUE
