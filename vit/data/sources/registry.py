"""The kinds of data sets by name, and the kind of a place."""

from collections.abc import Callable, Mapping
from functools import partial

from vit.data.dataset import Request
from vit.data.sources import folders, huggingface, named, shards
from vit.data.sources.listing import Listing
from vit.runtime.arguments import check_choice
from vit.runtime.places import explain_file, suggest

# kind of a place → function that is true for one; the first that is true counts
PLACES: Mapping[str, Callable[[str], bool]] = {
    "huggingface": huggingface.is_place,
    "webdataset": shards.is_place,
    "folder": folders.is_folder,
}
# data.name → function that lists the images of a request
SOURCES: Mapping[str, Callable[[Request], Listing]] = {
    "huggingface": huggingface.find_huggingface,
    "webdataset": shards.find_shards,
    "folder": folders.find_folder,
    "imagenet": named.find_imagenet,
    **named.NAMED,
}


def find_source(name: str) -> Callable[[Request], Listing]:
    """The function of a `data.name`. Raises ValueError for an unknown one."""
    if name.startswith("torchvision:"):
        return partial(named.find_torchvision, name)
    check_choice(name, SOURCES, name="data.name")
    return SOURCES[name]


def is_named(name: str) -> bool:
    """Return true for a data set that is known by its name alone."""
    # an unknown set of torchvision is refused when it is opened
    return (name in SOURCES and name not in PLACES) or name.startswith("torchvision:")


def find_kind(data: object) -> str | None:
    """The `data.name` for the name of a data set, or for a path, pattern or address of images; None
    if no source knows it."""
    text = str(data)
    if is_named(text):
        return text
    return next((kind for kind, is_place in PLACES.items() if is_place(text)), None)


def require_kind(data: object) -> str:
    """The `data.name` of `find_kind`. Raises ValueError if no source knows the data."""
    kind = find_kind(data)
    if kind is None:
        if problem := explain_file(str(data)):
            raise ValueError(f"--data {problem}")
        names = list(filter(is_named, SOURCES))
        raise ValueError(
            f"--data {data} is not a data set ({', '.join(names)}), a table (.csv,"
            " .jsonl, .parquet), a folder or shards (.tar)"
            f"{suggest(str(data), names) or '; check the path'}"
        )
    return kind
