"""Suggest the right path for a misspelled one, and the remedy for a file of another kind."""

import difflib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path

from vit.runtime.files import expand_home

_ARCHIVES = (".zip", ".7z", ".rar", ".tgz", ".gz", ".bz2", ".xz")
_SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")


def find_nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a misspelled one, or begins with it, if any."""
    name = name.casefold()
    by_folded = {each.casefold(): each for each in sorted(known, reverse=True)}
    near = difflib.get_close_matches(name, by_folded, n=1)
    near += sorted(each for each in by_folded if name and each.startswith(name))
    return by_folded[near[0]] if near else None


def suggest(path: str | Path, known: Iterable[str] = ()) -> str:
    """Return "; did you mean X?" for a path that doesn't exist: a known name, or the file or folder
    beside it, that is most like it; empty if there is none."""
    nearest = find_nearest_name(str(path), known)
    missing = expand_home(path)
    if nearest is None and missing.parent.is_dir():
        beside = find_nearest_name(missing.name, os.listdir(missing.parent))
        nearest = beside and str(missing.parent / beside)
    return f"; did you mean {shlex.quote(nearest)}?" if nearest else ""


def explain_file(path: str | Path) -> str:
    """Return what to do with an address, an archive or a spreadsheet; empty for anything else."""
    name = str(path).lower()
    if "://" in name:
        return f"{path} is an address; copy its files to this machine and name them"
    if name.endswith(_ARCHIVES) and os.path.isfile(path):
        return f"{path} is an archive; unpack it and name the folder"
    if name.endswith(_SPREADSHEETS) and os.path.isfile(path):
        return f"{path} is a spreadsheet; save the table as CSV and name that file"
    return ""
