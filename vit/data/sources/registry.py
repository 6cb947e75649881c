"""The kinds of data sets by name, and the kind of a place."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from vit.data.dataset import Request
from vit.data.sources import folders, huggingface, named, shards
from vit.data.sources.base import Root
from vit.data.sources.listing import Listing
from vit.runtime.arguments import shorten
from vit.runtime.places import explain_file, suggest


class Source(NamedTuple):
    """A kind of data set.

    Attributes:
        find: Function that lists the images of a request.
        recognizes: Function that is true for a place of such images; None for a data set that is
            known by its name.
        needs_root: The data set can't be found without `data.root`.
        unit: Word for the images in messages; empty for a published data set, whose images aren't
            counted.
    """

    find: Callable[[Request], Listing]
    recognizes: Callable[[str], bool] | None = None
    needs_root: bool = False
    unit: str = ""


# if several recognise the same place, the first one is taken
SOURCES = {
    "huggingface": Source(huggingface.find_huggingface, huggingface.is_place, True, "rows"),
    "webdataset": Source(shards.find_shards, shards.is_place, True, "files"),
    "folder": Source(folders.find_folder, folders.is_folder, True, "files"),
    "imagenet": Source(named.find_imagenet, None, True, "files"),
    **{name: Source(find) for name, find in named.NAMED.items()},
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
    kinds = (
        name
        for name, source in SOURCES.items()
        if source.recognizes is not None and source.recognizes(text)
    )
    return next(kinds, None)


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


def is_here(name: str, root: Root) -> bool:
    """Return true if the images of a data set can be read without a download."""
    is_found = root is not None and Path(root).exists()
    if name == "imagenette":
        return is_found and named.is_imagenette(Path(str(root)))
    return name == "digits" or (is_found and name in ("folder", "imagenet"))
