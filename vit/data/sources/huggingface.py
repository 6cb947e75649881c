"""Data sets of Hugging Face's library `datasets`: names on the Hub, directories of save_to_disk and
Parquet files."""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit.data.dataset import Request
from vit.data.sources.base import SPLIT_OF, ImageReader
from vit.data.sources.listing import Listing, as_labels
from vit.data.sources.remote import is_remote
from vit.data.sources.shards import list_by_split
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import expand_home

_IMAGES = ("image", "img")
_LABELS = ("label", "labels", "class")


class RowReader(ImageReader):
    """Images in rows of tables that are mapped from disk, as the bytes of their files.

    Args:
        tables: datasets.Dataset each.
        column: Their column of images.
        names: Names of the images.

    Raises:
        ValueError: It is another column.
    """

    def __init__(self, tables: Sequence[Any], column: str, names: Sequence[str]) -> None:
        # an extra
        import datasets
        import pyarrow.compute as pc  # type: ignore[import-untyped]

        stored = datasets.Image(decode=False)
        try:
            tables = [each.select_columns([column]).cast_column(column, stored) for each in tables]
        except (TypeError, ValueError, NotImplementedError) as error:
            kind = shorten(str(tables[0].features[column]))
            raise ValueError(f"the column {column} holds {kind}, not images") from error
        places = []
        for number, table in enumerate(tables):
            (values,) = table.with_format("arrow")[:].columns
            sizes = pc.fill_null(pc.binary_length(pc.struct_field(values, "bytes")), -1).to_numpy()
            places.append(np.stack([np.full(len(table), number), np.arange(len(table)), sizes], 1))
        files = [each["filename"] for table in tables for each in table.cache_files[:1]]
        super().__init__(names, np.concatenate(places).astype(np.int64), files)
        self._tables = tables

    def __getitem__(self, index: int) -> Path | bytes:
        number, row, _ = self.places[index].tolist()
        (stored,) = self._tables[number][row].values()
        if stored is None or stored["bytes"] is None:
            raise ValueError(f"{self.names[index]} holds no image; save the images in the rows")
        content: bytes = stored["bytes"]
        return content


def is_place(place: str) -> bool:
    """Return true for a name on the Hub, Parquet files or a directory that save_to_disk wrote."""
    if place.startswith("hf:") and not is_remote(place):
        return True
    path = expand_home(place)
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return is_saved or bool(_list_parquet(path))


def _list_parquet(path: Path) -> dict[str, list[str]]:
    """List the Parquet files of each split at a path."""
    if path.suffix == ".parquet" and path.is_file():
        return {"train": [str(path)]}
    return list_by_split(str(path), ".parquet") or list_by_split(str(path / "data"), ".parquet")


def find_huggingface(request: Request) -> Listing:
    """List a data set that the library `datasets` reads.

    An image is in the column image or img; its class is in label, labels or class, as a text, a
    whole number, or a number that the file's features name; several labels are a list of these.
    Splits without labels are left out.

    Args:
        request: Its root is "hf:NAME" or "hf:NAME:CONFIGURATION" of the Hub, a directory that
            save_to_disk wrote, a Parquet file or a folder of them (such as
            data/train-00000.parquet). Its cache holds the library's copies.

    Raises:
        ValueError: The library isn't installed, or there are no images and labels.
        OSError: The data set can't be read.
    """
    origin = f"data.root {request.root}"
    tables = _load(str(request.root), request.cache_dir / "datasets")
    features = next(iter(tables.values())).features
    image_column = _find_column(features, _IMAGES, origin)
    label_column = _find_column(features, _LABELS, origin)
    class_names = find_feature_names(features[label_column])
    used: dict[str, str] = {}
    labels: list[Any] = []
    for name, table in tables.items():
        values = list(table[label_column])
        split = SPLIT_OF.get(name.lower())
        # test splits of the Hub have -1
        if split is None or all(value in (None, -1, [], [-1]) for value in values):
            continue
        if split in used.values():
            raise ValueError(f"{origin} has two splits that are the {split} split; rename {name!r}")
        used[name] = split
        for row, value in enumerate(values):
            try:
                labels.append(_read_label(value, class_names, request.labels.task))
            except ValueError as error:
                raise ValueError(f"{origin} {name} row {row}: {error}") from error
    if not used:
        have = f"only {', '.join(tables)}; name one so"
        raise ValueError(f"{origin} has no labels in a split of {', '.join(SPLIT_OF)}, {have}")
    opened = [tables[name] for name in used]
    ids = [f"{name}/{row:05d}" for name in used for row in range(len(tables[name]))]
    left_out = [name for name in tables if name not in used]
    return Listing(
        name="huggingface",
        origin=origin,
        labels=labels,
        reader=RowReader(opened, image_column, ids),
        splits=[split for name, split in used.items() for _ in range(len(tables[name]))],
        class_names=class_names,
        notes=[f"the split {name!r} was left out" for name in left_out],
    )


def _find_column(features: Mapping[str, Any], names: Sequence[str], origin: str) -> str:
    """Find the first of the columns `names` that exists."""
    for name in names:
        if name in features:
            return name
    wanted = " or ".join(names)
    have = shorten(", ".join(features))
    raise ValueError(f"{origin} has no column {wanted}, only {have}; rename the right one")


def find_feature_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of the classes in a feature, one class or a list of them; None if it has
    none."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else tuple(map(str, names))


def _read_label(value: Any, names: Sequence[str] | None, task: str | None) -> Any:
    """Return the class of a row, or its labels, a tuple. Raises ValueError for anything else."""
    if isinstance(value, list) and task != "classes":
        return as_labels([_name_label(each, names) for each in value])
    if task == "multilabel":
        return tuple(filter(None, map(str.strip, str(value or "").split("|"))))
    return _name_label(value, names)


def _name_label(value: Any, names: Sequence[str] | None) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number and names is not None:
        if not 0 <= value < len(names):
            raise ValueError(f"label {value} is not one of the {len(names)} classes; correct it")
        return str(names[value])
    if not (is_number or (isinstance(value, str) and value)):
        text = f"label {shorten(repr(value))} is neither a text nor a whole number"
        raise ValueError(f"{text}; give each image one class")
    return str(value)


def _load(root: str, cache_dir: Path) -> dict[str, Any]:
    """Open a data set: split → table, as the library names and maps them."""
    try:
        # an extra, which takes seconds to import
        import datasets
    except ImportError as error:
        hint = "pip install '.[datasets]' in the clone of vit"
        raise ValueError(f"data.root {root} needs the library datasets; {hint}") from error
    path = expand_home(root)
    # the library takes names of files for patterns
    parquet = {split: list(map(glob.escape, files)) for split, files in _list_parquet(path).items()}
    try:
        if root.startswith("hf:"):
            name, _, configuration = root.removeprefix("hf:").partition(":")
            opened = datasets.load_dataset(name, configuration or None, cache_dir=str(cache_dir))
        elif parquet:
            opened = datasets.load_dataset(
                "parquet", data_files=parquet, cache_dir=str(cache_dir), batch_size=1000
            )
        else:
            opened = datasets.load_from_disk(str(path))
        tables = dict(opened) if isinstance(opened, dict) else {"train": opened}
        if not tables:
            raise ValueError("it names no splits")
        # damaged places of values would be read outside the file
        for table in tables.values():
            table.data.validate(full=True)
    except Exception as error:
        # the library, pyarrow and the client of the Hub raise errors of many types
        reason = shorten(first_line(error.__cause__ or error))
        raise OSError(f"data.root {root} can't be read as a data set: {reason}") from error
    # a directory may ask for rows of another library's types
    return {split: table.with_format(None) for split, table in tables.items()}
