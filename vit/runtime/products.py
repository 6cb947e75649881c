"""Functions of products that the core calls if they are there.

The core doesn't import the products (`vit/analysis`, `vit/deploy`), so that each can be deleted.
`vit.api` names their functions here; a function is imported when it is first needed.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# purpose → "module:function"
_FUNCTIONS: dict[str, str] = {}


def register_product(purpose: str, function: str) -> None:
    """Let the core call a function of a product.

    Args:
        purpose: Name under which the core asks for it.
        function: Where it is, as "module:function".
    """
    _FUNCTIONS[purpose] = function


def find_product(purpose: str) -> Callable[..., Any] | None:
    """Return the function registered for a purpose; None if there is none."""
    if purpose not in _FUNCTIONS:
        return None
    module, _, function = _FUNCTIONS[purpose].partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found
