"""Suggest the right path for a misspelled one, and the remedy for a file of another kind."""

import difflib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from vit.runtime.files import expand_home

_ARCHIVES = (".zip", ".7z", ".rar", ".tgz", ".gz", ".bz2", ".xz")
_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")


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
    """Return "; did you mean X?" for a path that doesn't exist; empty if nothing is like it.

    X is the known name, or the file or folder beside it, that is most like it.
    """
    nearest = find_nearest(str(path), known)
    missing = expand_home(path)
    if nearest is None and missing.parent.is_dir():
        beside = find_nearest(missing.name, os.listdir(missing.parent))
        nearest = beside and str(missing.parent / beside)
    return f"; did you mean {shlex.quote(nearest)}?" if nearest else ""


def is_archive(name: str) -> bool:
    """Return true if a file has the suffix of an archive or a compressed file."""
    return name.lower().endswith(_ARCHIVES)


def explain_file(path: str | Path) -> str:
    """Return what to do with an archive or a spreadsheet; empty for anything else."""
    if not os.path.isfile(path):
        return ""
    if is_archive(str(path)):
        return f"{path} is an archive; unpack it and name the folder"
    if str(path).lower().endswith(_SPREADSHEETS):
        return f"{path} is a spreadsheet; save the table as CSV and name that file"
    return ""
