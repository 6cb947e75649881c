"""The kinds of data sets: those of this project and those of other packages, registered alike."""

from collections.abc import Mapping
from functools import cache

from vit.data.dataset import Source
from vit.data.sources import folders, huggingface, named, published, shards
from vit.data.sources.base import Root
from vit.runtime.arguments import check_kind, shorten
from vit.runtime.places import explain_file, suggest
from vit.runtime.plugins import load_plugins

_sources: dict[str, Source] = {}


def register_source(source: Source) -> None:
    """Add a kind of data set, which `data.name` and `vit train` then know.

    Another package registers its source without this call, by an entry
    point of the group "vit.register_source" whose object is the source.

    Args:
        source: Name of the data set, and the function that finds its images.

    Raises:
        ValueError: The object is not a `vit.Source`, or its name is taken.

    Example:
        >>> vit.register_source(vit.Source("my_scans", find_my_scans))
        >>> vit.train("my_scans", output="runs/scans")
    """
    check_kind(source, Source, name="source", expected="a vit.Source")
    if _sources.get(source.name, source) is not source:
        raise ValueError(f"there is a source {source.name!r} already; choose another name")
    _sources[source.name] = source


# if several recognise the same folder, the last one is taken
for _source in (
    *named.SOURCES,
    folders.SOURCE,
    *published.SOURCES,
    shards.SOURCE,
    huggingface.SOURCE,
):
    register_source(_source)


@cache
def _load_plugins() -> None:
    load_plugins("vit.register_source", register_source)


def known_sources() -> dict[str, Source]:
    """All kinds of data sets by name."""
    _load_plugins()
    return _sources


def find_source(name: str) -> Source:
    """The source of a `data.name`. Raises ValueError for an unknown one."""
    sources = known_sources()
    if name not in sources:
        prefix = name.partition(":")[0] + ":"
        alike = [each.removeprefix(prefix) for each in sources if each.startswith(prefix)]
        if ":" in name and alike:
            raise ValueError(
                f"data.name {shorten(repr(name))} is not read; {prefix}NAME is one of"
                f" {', '.join(sorted(alike))}"
            )
        raise ValueError(f"unknown data.name {shorten(name)!r}; known: {describe_names(sources)}")
    return sources[name]


def describe_names(sources: Mapping[str, Source]) -> str:
    """The names of sources for a message, those of one prefix as one: "torchvision:NAME"."""
    parts = [name.partition(":") for name in sources]
    return ", ".join(sorted({f"{prefix}:NAME" if colon else prefix for prefix, colon, _ in parts}))


def list_named_sets() -> dict[str, Source]:
    """The data sets that are known by their name alone."""
    return {name: source for name, source in known_sources().items() if source.recognizes is None}


def find_kind(data: object) -> str | None:
    """The `data.name` for the name of a data set, or for a path, pattern or address of images.

    Args:
        data: The name or the place.

    Returns:
        The name; None if no source knows it.
    """
    text = str(data)
    prefix, colon, _ = text.partition(":")
    named_sets = list_named_sets()
    # an unknown set of a known prefix is refused when it is opened, which names the known ones
    if text in named_sets or (
        colon and any(name.startswith(prefix + colon) for name in named_sets)
    ):
        return text
    for source in reversed(known_sources().values()):
        if source.recognizes is not None and source.recognizes(text):
            return source.name
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
    sources = known_sources()
    return name in sources and sources[name].is_here(root)
