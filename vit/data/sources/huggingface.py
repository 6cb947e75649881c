"""Data sets of Hugging Face's library `datasets`: names on the Hub and Parquet files. Their rows
are read as items from Python are."""

import glob
from dataclasses import replace
from pathlib import Path
from typing import Any

from vit.data.dataset import ImageRule
from vit.data.images import IMAGE_KEYS, LABEL_KEYS, find_key
from vit.data.sources.base import SPLIT_OF, Listing
from vit.data.sources.python_objects import find_class_names, find_python_objects
from vit.data.sources.shards import list_by_split
from vit.runtime.arguments import first_line, shorten
from vit.runtime.files import default_cache_dir, expand_home
from vit.runtime.hub import offline_if_unreachable

# labels of splits that have none: the Hub hides those of test images
_NO_LABELS = {"-1", "None", "[]", "['-1']"}


class Rows:
    """Rows of a datasets.Dataset as items: the bytes of an image's file, and the name of its class
    or a list of its labels. Raises ValueError if it lacks a column of images or of labels."""

    is_on_disk = True

    def __init__(self, table: Any, *, name: str) -> None:
        # an extra
        import datasets

        self._image = find_key(table.features, IMAGE_KEYS, name=name)
        self.classes = find_class_names(table)
        self.labels = list(map(self._name, table[find_key(table.features, LABEL_KEYS, name=name)]))
        try:
            # the library would decode images, or open the files that a stranger's rows name
            self._table = table.cast_column(self._image, datasets.Image(decode=False))
        except (TypeError, ValueError, NotImplementedError) as error:
            kind = shorten(str(table.features[self._image]))
            raise ValueError(f"{name}: the column {self._image} is {kind}, no image") from error

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        stored = self._table[index][self._image] or {}
        # decoding nothing names the image
        return stored.get("bytes") or b"", self.labels[index]

    def _name(self, value: Any) -> Any:
        """Return a label as a text: a number is that of a class with a name, or is the name."""
        if isinstance(value, list):
            return list(map(self._name, value))
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if self.classes is not None and 0 <= value < len(self.classes):
            return self.classes[value]
        return str(value)


def is_place(place: str) -> bool:
    """Return true for a name on the Hub or Parquet files."""
    return (place.startswith("hf:") and not place.startswith("hf://")) or bool(_list_parquet(place))


def _list_parquet(place: str) -> dict[str, list[str]]:
    """List the Parquet files of each split at a place: a file, or a folder such as a clone of a
    repository of the Hub."""
    path = expand_home(place)
    if path.suffix == ".parquet" and path.is_file():
        return {"train": [str(path)]}
    return list_by_split(str(path), ".parquet") or list_by_split(str(path / "data"), ".parquet")


def find_huggingface(root: Path | str, rule: ImageRule) -> Listing:
    """List the data set "hf:NAME" or "hf:NAME:CONFIGURATION" of the Hub, or Parquet files, but for
    splits without labels.

    A class is a text, a whole number, or a number that the file's features name; several labels are
    a list of these. Raises ValueError if the library isn't installed, or there are no images and
    labels, and OSError if the data set can't be read.
    """
    origin = f"data.root {root}"
    tables = _load(str(root), origin=origin)
    rows = {name: Rows(table, name=f"{origin} {name}") for name, table in tables.items()}
    used = {
        name: each
        for name, each in rows.items()
        if name.lower() in SPLIT_OF and not set(map(str, each.labels)) <= _NO_LABELS
    }
    if not used:
        raise ValueError(f"{origin} has no labels in a split of {', '.join(SPLIT_OF)}")
    sets = {name.lower(): each for name, each in used.items()}
    try:
        listing = find_python_objects(sets, None, task=rule.task)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error
    listing.reader.names = [f"{name}/{row:05d}" for name in used for row in range(len(used[name]))]
    notes = [f"the split {name!r} was left out" for name in rows if name not in used]
    return replace(listing, keeps_validation=False, notes=notes)


def _load(root: str, *, origin: str) -> Any:
    """Open a data set: split → table, as the library names and maps them."""
    try:
        # an extra, which takes seconds to import
        import datasets
    except ImportError as error:
        hint = "pip install '.[datasets]' in the clone of vit"
        raise ValueError(f"{origin} needs the library datasets; {hint}") from error
    if not is_place(root):
        raise ValueError(f"{origin} holds no Parquet files; check the path")
    # the library takes names of files for patterns
    parquet = {split: list(map(glob.escape, files)) for split, files in _list_parquet(root).items()}
    name, _, configuration = root.removeprefix("hf:").partition(":")
    cache_dir = str(default_cache_dir() / "datasets")
    try:
        if parquet:
            return datasets.load_dataset(
                "parquet", data_files=parquet, batch_size=1000, cache_dir=cache_dir
            )
        with offline_if_unreachable():
            return datasets.load_dataset(name, configuration or None, cache_dir=cache_dir)
    except Exception as error:
        # the library, pyarrow and the client of the Hub raise errors of many types
        reason = shorten(first_line(error.__cause__ or error))
        raise OSError(f"{origin} can't be read as a data set: {reason}") from error
