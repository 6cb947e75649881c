"""Train vision transformers on your own images, evaluate them and explain them with attention maps.

The public names are those that `vit.api` imports. Importing this package loads nothing heavy: each
name is imported on its first use, and torch with it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vit.runtime.version import __version__ as __version__

if TYPE_CHECKING:
    from vit.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import a public name on its first use (PEP 562)."""
    # it parses vit/api.py, which `import vit` does without
    from vit.runtime.signatures import list_public_names

    modules = list_public_names()
    if name == "__all__":
        return sorted([*modules, "__version__"])
    if name not in modules:
        raise AttributeError(
            f"module 'vit' has no attribute {name!r}; it has {', '.join(sorted(modules))}"
        )
    return getattr(import_module(modules[name]), name)


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
