"""Columns of a table by their names and values: image files, classes, splits and groups."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from vit.data.dataset import LabelRule
from vit.data.images import is_image_name
from vit.data.sources.base import SPLIT_OF
from vit.data.sources.table_paths import FileFinder
from vit.data.sources.table_text import LABEL_NAMES, PATH_NAMES, Table, simplify
from vit.runtime.arguments import shorten

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
_FALSE = ("false", "0", "no", "0.0", "0,0", "f", "n")
# columns that may say which images belong together: patient_id, Standort, lesion
_GROUP_NAME = re.compile(
    r"(patient|subject|case|lesion|individual|animal|person|donor|slide|specimen|site|location|"
    r"standort|station|camera|deployment|sequence|seq|burst|plot|group|study)s?(_?(id|name|uid|no|nr))?"
)
_NAME_COLUMN = "name the right one (--{}-column NAME), or "
_PATH_OPTION = _NAME_COLUMN.format("path")
# rows that a column is tried on
_SAMPLE = 20


def choose_path_column(table: Table, finder: FileFinder) -> int:
    """Choose the column that names the images. Raises ValueError if there is none."""
    # many addresses, or paths that are nowhere, are rows that can't be read
    known = [
        place for name in PATH_NAMES for place, other in enumerate(table.names) if name == other
    ]
    if known and "://" in "".join(_sample(table, known[0])):
        return known[0]
    try:
        return _choose_path(table, None, finder)
    except ValueError as error:
        # nothing but the name of the column can say it here
        raise ValueError(str(error).replace(_PATH_OPTION, "")) from None


class Columns(NamedTuple):
    """Places of the columns that are read.

    Attributes:
        classes: The column of the classes, or the columns of which one is 1 in each row.
        splits: Value of the column `split` → the split.
    """

    path: int
    classes: Sequence[int]
    split: int | None
    splits: Mapping[str, str]
    group: int | None


def choose_columns(table: Table, rule: LabelRule, finder: FileFinder) -> Columns:
    """Choose the columns that are read, and add to the guesses and notes of the table.

    Args:
        table: The table.
        rule: Columns that the user names.
        finder: Finds its image files.

    Raises:
        ValueError: Columns can't be told apart; the message lists them.
    """
    if not table.rows and not table.short:
        raise ValueError(f"{table.path} holds no rows; write an image and its class into each")
    path = _choose_path(table, rule.path_column, finder)
    split, splits = _choose_split(table)
    group = table.names.index("group") if "group" in table.names else None
    others = [place for place in range(table.width) if place not in (path, split, group)]
    label = _choose_label(table, others, rule.label_column)
    if group is None:
        _note_groups(table, {path, split, label})
    if label is not None:
        return Columns(path, [label], split, splits, group)
    flags = _find_flags(table, others)
    if not flags:
        raise _ask(table, "no column is known to hold the classes", "label")
    _check_near_flags(table, set(others) - set(flags))
    columns = shorten(", ".join(table.columns[place] for place in flags))
    table.guesses.append(f"one column for each class ({columns})")
    return Columns(path, flags, split, splits, group)


def _ask(table: Table, text: str, kind: str) -> ValueError:
    """Return the error that asks for the column of a kind."""
    if not table.columns:
        return ValueError(f"{table.path}: {text}; add a first line such as path,label")
    columns = shorten(", ".join(map(repr, table.columns)), 600)
    hint = f"{_NAME_COLUMN.format(kind)}call it {kind}"
    return ValueError(f"{table.path}: {text}; its columns are {columns}; {hint}")


def find_column(table: Table, column: str) -> int:
    """Find any column by its name.

    Raises:
        ValueError: There is no such column.
    """
    wanted = _list_named(table, column)
    if not wanted:
        columns = shorten(", ".join(map(repr, table.columns)), 600) or "not named"
        raise ValueError(f"{table.path} has no column {shorten(column)!r}; they are {columns}")
    return wanted[0]


def _list_named(table: Table, column: str) -> list[int]:
    wanted = [place for place, name in enumerate(table.columns) if name == column.strip()]
    return wanted or [place for place, name in enumerate(table.names) if name == simplify(column)]


def _find_named(table: Table, column: str, kind: str) -> int:
    """Find a column that the user names."""
    wanted = _list_named(table, column)
    if len(wanted) != 1:
        text = "several columns" if wanted else "no column"
        raise _ask(table, f"{text} {shorten(column)!r}", kind)
    return wanted[0]


def _sample(table: Table, place: int) -> list[str]:
    """Return some values of a column."""
    step = max(1, len(table.rows) // _SAMPLE)
    return [str(fields[place]) for _, fields in table.rows[::step]][:_SAMPLE]


def _describe(table: Table, place: int) -> str:
    return repr(table.columns[place]) if table.columns else f"column {place + 1}"


def _choose_path(table: Table, column: str | None, finder: FileFinder) -> int:
    if column is not None:
        return _find_named(table, column, "path")

    def holds_files(place: int) -> bool:
        values = _sample(table, place)
        return finder.count_files(values) > len(values) / 2

    known = [
        place for name in PATH_NAMES for place, other in enumerate(table.names) if name == other
    ]
    chosen = next(filter(holds_files, known), None)
    if chosen is None:
        # any other column may hold the paths, too; one file may be named by all rows, and numbers
        # may be names of files
        others = (place for place in range(table.width) if place not in known)
        rates = {place: _rate_paths(table, place) for place in filter(holds_files, others)}
        best = [place for place, rate in rates.items() if rate == max(rates.values())]
        if len(best) > 1:
            columns = " and ".join(_describe(table, place) for place in best[:2])
            raise _ask(table, f"both {columns} may name the images", "path")
        values = [value for place in range(table.width) for value in _sample(table, place)]
        if not best and any("://" in value for value in values):
            text = "the images are addresses of the web; download them, and write their paths"
            raise _ask(table, text, "path")
        # rows without files are reported later
        chosen = next(iter([*best, *known]), None)
    if chosen is None:
        raise _ask(table, "no column is known to name the images", "path")
    if table.names[chosen] != "path":
        table.guesses.append(f"image in {_describe(table, chosen)}")
    return chosen


def _rate_paths(table: Table, place: int) -> tuple[bool, bool]:
    """Rate how much a column looks like one of paths: by different values, then by suffixes."""
    values = _sample(table, place)
    return len(set(values)) > len(values) / 2, sum(map(is_image_name, values)) > len(values) / 2


def _choose_label(table: Table, others: Sequence[int], column: str | None) -> int | None:
    if column is not None:
        return _find_named(table, column, "label")
    names = table.names
    known = [place for name in LABEL_NAMES for place in others if names[place] == name]
    if not known:
        # two columns leave no choice
        known = [place for place in others if names[place] or not table.columns]
        if len(known) != 1:
            return None
        values = set(map(str, table.values(known[0])))
        if len(values) > max(len(table.rows) / 2, 2):
            return None
    label, *rest = known
    if [names[place] for place in known].count(names[label]) > 1:
        text = f"several columns are called {table.columns[label]!r}"
        raise ValueError(f"{table.path}: {text}; rename the others")
    flags = _find_flags(table, others)
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
        raise _ask(table, f"both {columns} may hold the classes", "label")
    # two columns may say the same: the one with words is taken
    if rest and not different and _is_numeric(table, label):
        label = next((place for place in rest if not _is_numeric(table, place)), label)
    for place in others:
        if re.fullmatch(rf"{re.escape(names[label])}s?_?[0-9]+", names[place]):
            table.notes.append(
                f"the column {table.columns[place]!r} of {table.path.name} is not used: an image has "
                f"one class, in {_describe(table, label)}"
            )
    if names[label] != "label" or rest:
        table.guesses.append(f"label in {_describe(table, label)}")
    return label


def _are_equivalent(table: Table, first: int, second: int) -> bool:
    """Return true if two columns divide the rows alike."""
    pairs = {(str(fields[first]), str(fields[second])) for _, fields in table.rows}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def _is_numeric(table: Table, place: int) -> bool:
    return all(re.fullmatch(r"-?[0-9.]+", value) for value in _sample(table, place))


def _choose_split(table: Table) -> tuple[int | None, Mapping[str, str]]:
    """Choose the column of the splits, and warn of others that look like one.

    Returns:
        Its place, and value → split; None if there is no such column.
    """
    if "split" in table.names:
        return table.names.index("split"), SPLIT_OF
    chosen: tuple[int | None, Mapping[str, str]] = (None, {})
    for place, name in enumerate(table.names):
        if name not in (*_SPLIT_NAMES, *_SPLIT_FLAGS, *_UNCLEAR_NAMES):
            continue
        values = {str(value).casefold() for value in table.values(place)}
        splits: dict[str, str] = {}
        if values <= _SPLIT_VALUES.keys():
            splits = {value: _SPLIT_VALUES[value] for value in values}
        elif name in _SPLIT_FLAGS and values <= {*_TRUE, *_FALSE, ""}:
            flagged = _SPLIT_FLAGS[name]
            rest = "test" if flagged == "train" else "train"
            splits = {value: flagged if value in _TRUE else rest for value in values}
        column = table.columns[place]
        if splits and chosen[0] is None:
            chosen = (place, splits)
            text = ", ".join(f"{shorten(value, 30)} is {splits[value]}" for value in sorted(values))
            table.guesses.append(f"split in {column!r} ({text})")
        # a column of many values is something else, such as a number
        elif len(values) <= _SAMPLE:
            known = shorten(", ".join(sorted(values)), 60)
            table.notes.append(
                f"the column {column!r} of {table.path.name} ({known}) looks like a split and is "
                "not used; call it split, with the values train, validation and test, to use it"
            )
    return chosen


def _note_groups(table: Table, others: Collection[int | None]) -> None:
    """Warn of columns that look like groups."""
    for place, name in enumerate(table.names):
        if place in others or not _GROUP_NAME.fullmatch(name):
            continue
        num_values = len(set(map(str, table.values(place))))
        # one value in each row groups nothing
        if 1 < num_values < len(table.rows):
            table.notes.append(
                f"the column {table.columns[place]!r} of {table.path.name} ({num_values:,} values) "
                "looks like groups of images and is not used; call it group to keep each group in "
                "one split"
            )


def _find_flags(table: Table, others: Sequence[int]) -> list[int]:
    """Find the columns that hold 0 or 1, if there are at least two."""
    found = [place for place in others if all(map(_is_flag, table.values(place)))]
    return found if table.columns and table.rows and len(found) >= 2 else []


def _check_near_flags(table: Table, others: Collection[int]) -> None:
    """Raise ValueError for a column of 0 and 1 in which some values are something else: it would be
    left out."""
    for place in sorted(others):
        values = [str(value) for value in table.values(place)]
        wrong = [
            line for (line, _), value in zip(table.rows, values, strict=True) if not _is_flag(value)
        ]
        if len(wrong) <= len(values) / 2 and {"0", "1"} & {value[:1] for value in values}:
            value = next(value for value in values if not _is_flag(value))
            text = f"{_describe(table, place)} holds 0 and 1, and {shorten(value, 30)!r} in line {wrong[0]}"
            more = f" and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
            raise ValueError(f"{table.path}: {text}{more}; write 0 or 1, or remove the column")


def _is_flag(value: Any) -> bool:
    return str(value).casefold() in (*_TRUE, *_FALSE)


def is_true(value: Any) -> bool:
    """Return true for the value of a one-hot column at the row's class."""
    return str(value).casefold() in _TRUE
