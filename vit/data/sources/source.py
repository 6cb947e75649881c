"""A kind of data set, as it is registered."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vit.data.class_names import ClassChoice
from vit.data.dataset import SourceSplits
from vit.data.sources.base import Root


class Request(NamedTuple):
    """The images that a source is asked for.

    Attributes:
        root: Place of the images, `data.root`.
        classes: Classes to keep, by name; None keeps all.
        cache_dir: Folder for downloads and for what is read once.
        allow_outside: A table may name images outside its folder.
    """

    root: Root
    classes: ClassChoice
    cache_dir: Path
    allow_outside: bool = False


@dataclass(frozen=True)
class Source:
    """A kind of data set, for `vit.register_source`.

    Args:
        name: The `data.name` of the data set.
        find: Function that finds the splits of a request: `request.root` is the
            place of the images, `request.classes` are the classes to keep, and
            it returns a `vit.data.dataset.SourceSplits`.
        recognizes: Function that is true for a path, pattern or address of such
            images: users then name their images by it. None for a data set that
            is known only by its name.
        needs_root: The data set can't be found without `data.root`.
        is_here: Function that is true if the images at a root can be read
            without a download.
        unit: Word for the images in messages, "files" or "rows"; empty for a
            published data set, whose images aren't counted.

    Example:
        >>> source = vit.Source("colours", find_colours, needs_root=True)
        >>> vit.register_source(source)
    """

    name: str
    find: Callable[[Request], SourceSplits]
    recognizes: Callable[[str], bool] | None = None
    needs_root: bool = False
    is_here: Callable[[Root], bool] = lambda root: False
    unit: str = ""


def root_exists(root: Root) -> bool:
    """Return true if there is something at a root on this machine."""
    return root is not None and Path(root).exists()
