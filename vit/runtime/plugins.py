"""Objects that other installed packages add to this one, by entry points."""

import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

from vit.runtime.arguments import first_line


def list_plugins(group: str) -> list[tuple[str, str]]:
    """List the entry points of a group by name, without importing their packages.

    Returns:
        (name of the entry point, name of its package).
    """
    entry_points = metadata.entry_points(group=group)
    return sorted({(each.name, each.dist.name if each.dist else "") for each in entry_points})


def load_plugins(group: str, register: Callable[[Any], object]) -> None:
    """Register the objects that installed packages offer as entry points.

    A package that can't be loaded is left out with a warning, so that it stops nobody who doesn't
    use it. Call this when a registry is first read: it imports the packages.

    Args:
        group: Group of the entry points, the name of the public function: "vit.register_source".
        register: Function that takes each object; it raises ValueError for a wrong one.
    """
    for entry_point in metadata.entry_points(group=group):
        try:
            register(entry_point.load())
        except Exception as error:
            # importing another package may raise anything
            text = f"the entry point {entry_point.name} of {group} ({entry_point.value})"
            warnings.warn(
                f"{text} is left out: {first_line(error)}; update or uninstall its package",
                stacklevel=2,
            )
