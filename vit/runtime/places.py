"""Suggest the right path for a misspelled one, and the remedy for a file of another kind."""

import difflib
import os
import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from vit.runtime.files import expand_home

_ARCHIVES = (".zip", ".7z", ".rar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".gz", ".bz2", ".xz")
_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
_DOCUMENTS = (".pdf", ".docx", ".doc", ".odt", ".pptx", ".ppt", ".odp")
# Entries of a folder that are compared with a misspelled name.
_MAX_ENTRIES = 10_000
# Bytes of a JSON file, at each end, in which its keys are looked for.
_READ_BYTES = 2**20
# Words of a command that may be one path with spaces.
_MAX_WORDS = 6


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a misspelled one, or begins with it; None if there is
    none."""
    name = name.casefold()
    by_folded = {each.casefold(): each for each in sorted(known, reverse=True)}
    near = difflib.get_close_matches(name, by_folded, n=1) or sorted(
        each for each in by_folded if name and each.startswith(name)
    )
    return by_folded[near[0]] if near else None


def suggest(path: str | Path, known: Iterable[str] = ()) -> str:
    """Return "; did you mean X?" for a path that doesn't exist, where X is the known name, or the file
    or folder beside it, that is most like it; empty if there is none."""
    nearest = find_nearest(str(path), known)
    if nearest is None:
        missing = expand_home(path)
        # the first part that is missing
        while not os.path.lexists(missing.parent) and missing.parent != missing:
            missing = missing.parent
        try:
            with os.scandir(missing.parent) as entries:
                names = [each.name for each in islice(entries, _MAX_ENTRIES)]
        except OSError:
            return ""
        beside = find_nearest(missing.name, (name for name in names if not name.startswith(".")))
        nearest = None if beside is None else str(missing.parent / beside)
    return "" if nearest is None else f"; did you mean {shlex.quote(nearest)}?"


def is_archive(name: str) -> bool:
    """Return true if a file has the suffix of an archive or a compressed file."""
    return name.lower().endswith(_ARCHIVES)


def explain_file(path: str | Path) -> str:
    """Return what to do with a file that is neither images nor a table, such as an archive; empty for
    other files."""
    name = str(path).lower()
    if not os.path.isfile(path):
        return ""
    if is_archive(name):
        return f"{path} is an archive; unpack it and name the folder"
    if name.endswith(_SPREADSHEETS):
        return f"{path} is a spreadsheet; save the table as CSV and name that file"
    if name.endswith(_DOCUMENTS):
        return f"{path} is a document; save its pictures as image files and name their folder"
    if name.endswith(".json") and is_detection_file(path):
        return (
            f"{path} is a detection file (COCO), with boxes and not one class for each image; write a"
            " table with the columns path and label (CSV), or a folder of images for each class"
        )
    return ""


def is_detection_file(path: str | Path) -> bool:
    """Return true for a JSON file with the keys of COCO. Its beginning and its end are read."""
    with open(path, "rb") as file:
        text = file.read(_READ_BYTES)
        file.seek(max(os.path.getsize(path) - _READ_BYTES, 0))
        text += file.read()
    return all(f'"{key}"'.encode() in text for key in ("images", "annotations"))


def suggest_quotes(words: Sequence[str]) -> str:
    """Return a hint if several words of a command, joined by spaces, are a path; else empty."""
    for start, word in enumerate(words):
        if word.startswith("-") or os.path.lexists(word):
            continue
        for end in range(start + 2, min(start + _MAX_WORDS, len(words)) + 1):
            joined = " ".join(words[start:end])
            if os.path.lexists(joined):
                return f"; a path with spaces needs quotes: {shlex.quote(joined)}"
    return ""
