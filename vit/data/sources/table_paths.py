"""Image files for the paths that a table has, as Windows, Kaggle and other folders write them."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from vit.data.images import is_image_name, list_files
from vit.data.sources.base import SPLIT_OF, relative_path

# paths by which the folders before them are recognised
_SAMPLE = 50
# folders of images that a table "train_labels.csv" or "train_set.csv" may mean
_STEM_ENDINGS = ("_labels", "_set", "_list", "_images", "_metadata", "_data")


class FileFinder:
    """Finds the image file that a value of a table names.

    Args:
        table: The table. Its paths are relative to its folder.

    Attributes:
        guesses: How often paths were taken for something else than they say, by the reason.
    """

    def __init__(self, table: Path) -> None:
        self.folder = table.parent
        self._stems = _list_stems(table.stem)
        self.guesses: Counter[str] = Counter()
        # folders before the paths, which aren't here
        self._prefix = ""

    def count_files(self, values: Sequence[str]) -> int:
        """Count the values that name a file."""
        self.learn(values)
        return sum(bool(self.find(value)) for value in values)

    def learn(self, values: Sequence[str]) -> None:
        """Find the folders that all paths begin with and that lead to the table's own folder: of
        "C:/photos/a.jpg" the first part, in C:/photos."""
        self._prefix = ""
        paths = list(map(_read_slashes, values))
        parents = [PurePosixPath(path).parts[:-1] for path in paths]
        # all paths share the folders that the first and the last in order share
        pairs = zip(min(parents, default=()), max(parents, default=()), strict=False)
        common = [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        paths = paths[:_SAMPLE]
        # paths below the table's folder need none
        if any(map(self._exists, paths)):
            return
        for count in range(len(common), 0, -1):
            start = "/".join(common[:count]).replace("//", "/") + "/"
            is_own = common[count - 1].casefold() == self.folder.absolute().name.casefold()
            if is_own and any(self._exists(path.removeprefix(start)) for path in paths):
                self._prefix = start
                return

    def find(self, written: str, *, split: str | None = None) -> list[str]:
        """Find the files that a value may mean.

        Args:
            written: The value.
            split: Split of its row, which tells files in train/ and test/ apart.

        Returns:
            Paths relative to the table's folder: none, the one that is meant, or several.
        """
        if self._exists(written):
            return [written]
        slashed = _read_slashes(written)
        path = slashed.removeprefix(self._prefix)
        # a slash of the web begins at the folder, and its spaces are %20
        web = "paths read as addresses of the web"
        for other, reason in (
            (slashed, "\\ read as /"),
            (path, f"{self._prefix} left out"),
            (path.lstrip("/"), web),
            (unquote(path), web),
        ):
            if other != written and self._exists(other):
                self.guesses[reason] += 1
                return [other]
        if not path or path.startswith("/") or ":" in path[:3]:
            return []

        found = list(self._search(path))
        if len(found) > 1:
            in_split = [
                file for file in found if SPLIT_OF.get(file.partition("/")[0].casefold()) == split
            ]
            found = in_split if split and in_split else found
        if len(found) == 1:
            self._explain(path, found[0])
        return found

    def _exists(self, path: str) -> bool:
        return bool(path) and "\0" not in path and os.path.isfile(os.path.join(self.folder, path))

    def _search(self, path: str) -> Iterator[str]:
        """Find the files below the folder whose paths end with a path, with or without its
        suffix."""
        parts = _simplify(os.path.normpath(path)).split("/")
        if ".." in parts:
            return
        for file in self._files.get(parts[-1], ()):
            own = _simplify(file).split("/")
            is_below = not self._own_folders or own[0] in self._own_folders
            if is_below and own[-len(parts) : -1] == parts[:-1]:
                yield file

    @cached_property
    def _own_folders(self) -> set[str]:
        """Folders of images beside the table that have its name, such as train/ or train_images/
        for train.csv."""
        all_files = (file for files in self._files.values() for file in files)
        folders = {_simplify(file.partition("/")[0]) for file in all_files if "/" in file}
        return {name for name in folders if self._stems & _list_stems(name)}

    @cached_property
    def _files(self) -> dict[str, list[str]]:
        """Paths of all images below the folder, by their names with and without suffix."""
        files: dict[str, list[str]] = {}
        # images often are in a linked folder; links further down may lead anywhere
        own = os.path.realpath(self.folder) + os.sep
        links = (entry for entry in self.folder.iterdir() if entry.is_symlink() and entry.is_dir())
        places = [link for link in links if not own.startswith(os.path.realpath(link) + os.sep)]
        for place in (self.folder, *places):
            for file in filter(is_image_name, list_files(place, left_out=[])):
                relative = relative_path(file, self.folder)
                name = _simplify(os.path.basename(file))
                for key in (name, os.path.splitext(name)[0]):
                    files.setdefault(key, []).append(relative)
        return files

    def _explain(self, path: str, file: str) -> None:
        has_suffix = os.path.splitext(path)[1].casefold() == os.path.splitext(file)[1].casefold()
        if not has_suffix:
            self.guesses[f"{os.path.splitext(file)[1]} added"] += 1
        folder = os.path.dirname(file)
        if folder and os.path.dirname(os.path.normpath(path)) != folder:
            self.guesses[f"found in {folder.partition('/')[0]}/"] += 1
        elif has_suffix:
            self.guesses["found with other letters"] += 1


def find_table_split(table: Path) -> str | None:
    """Find the split that a table's name says, such as that of train_labels.csv."""
    return next((SPLIT_OF[stem] for stem in _list_stems(table.stem) if stem in SPLIT_OF), None)


def _read_slashes(path: str) -> str:
    """Return a path with slashes, and an address (gs://bucket/a.jpg) as a path (/bucket/a.jpg)."""
    return re.sub(r"^[A-Za-z][A-Za-z0-9+]+:/+", "/", path.replace("\\", "/"))


def _list_stems(name: str) -> set[str]:
    """List a name with and without its ending: train_labels and train."""
    stem = _simplify(name)
    return {stem, *(stem.removesuffix(ending) for ending in _STEM_ENDINGS)}


def _simplify(path: str) -> str:
    """Return a path as it is compared: é is one character or two, letters are small or large."""
    return unicodedata.normalize("NFC", path).casefold()
