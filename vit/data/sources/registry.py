"""The kinds of data sets by name, and the kind of a place."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from vit.data.dataset import Request, SourceSplits
from vit.data.sources import folders, huggingface, named, shards
from vit.data.sources.base import Root
from vit.runtime.arguments import shorten
from vit.runtime.places import explain_file, suggest


class Source(NamedTuple):
    """A kind of data set.

    Attributes:
        find: Function that finds the splits of a request.
        recognizes: Function that is true for a place of such images; None for a data set that is
            known by its name.
        needs_root: The data set can't be found without `data.root`.
        unit: Word for the images in messages; empty for a published data set, whose images aren't
            counted.
    """

    find: Callable[[Request], SourceSplits]
    recognizes: Callable[[str], bool] | None = None
    needs_root: bool = False
    unit: str = ""


# if several recognise the same place, the last one is taken
SOURCES = {
    **{name: Source(find) for name, find in named.NAMED.items()},
    "imagenet": Source(named.find_imagenet, needs_root=True, unit="files"),
    "folder": Source(folders.find_folder, folders.is_folder, needs_root=True, unit="files"),
    "webdataset": Source(shards.find_shards, shards.is_place, needs_root=True, unit="files"),
    "huggingface": Source(
        huggingface.find_huggingface, huggingface.is_place, needs_root=True, unit="rows"
    ),
}


def find_source(name: str) -> Source:
    """The source of a `data.name`. Raises ValueError for an unknown one."""
    if name in SOURCES:
        return SOURCES[name]
    prefix = f"{name.partition(':')[0]}:"
    alike = [each.removeprefix(prefix) for each in SOURCES if each.startswith(prefix)]
    if ":" in name and alike:
        raise ValueError(
            f"data.name {shorten(repr(name))} is not read; {prefix}NAME is one of"
            f" {', '.join(sorted(alike))}"
        )
    raise ValueError(f"unknown data.name {shorten(name)!r}; known: {describe_names(SOURCES)}")


def describe_names(names: Iterable[str]) -> str:
    """The names of sources for a message, those of one prefix as one: "torchvision:NAME"."""
    parts = [name.partition(":") for name in names]
    return ", ".join(sorted({f"{prefix}:NAME" if colon else prefix for prefix, colon, _ in parts}))


def list_named_sets() -> list[str]:
    """The data sets that are known by their name alone."""
    return [name for name, source in SOURCES.items() if source.recognizes is None]


def find_kind(data: object) -> str | None:
    """The `data.name` for the name of a data set, or for a path, pattern or address of images.

    Args:
        data: The name or the place.

    Returns:
        The name; None if no source knows it.
    """
    text = str(data)
    # an unknown set of a known prefix is refused when it is opened, which names the known ones
    if text in list_named_sets() or text.startswith("torchvision:"):
        return text
    known = [name for name, source in SOURCES.items() if source.recognizes is not None]
    for name in reversed(known):
        recognizes = SOURCES[name].recognizes
        if recognizes is not None and recognizes(text):
            return name
    return None


def require_kind(data: object) -> str:
    """The `data.name` of `find_kind`. Raises ValueError if no source knows the data."""
    kind = find_kind(data)
    if kind is None:
        text = str(data)
        if problem := explain_file(text):
            raise ValueError(f"--data {problem}")
        known = list_named_sets()
        files = "a table (.csv, .jsonl, .parquet), a folder or shards (.tar)"
        hint = suggest(text, known) or "; check the path"
        raise ValueError(
            f"--data {text} is not a data set ({describe_names(known)}), {files}{hint}"
        )
    return kind


def is_here(name: str | None, root: Root) -> bool:
    """Return true if the images of a data set can be read without a download."""
    if name == "digits":
        return True
    if root is None or not Path(root).exists():
        return False
    return name in ("folder", "imagenet") or (
        name == "imagenette" and named.is_imagenette(Path(root))
    )
