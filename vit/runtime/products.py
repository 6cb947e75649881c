"""Functions of products that the core calls where they are there.

The core imports no product (`vit/analysis`, `vit/deploy`), so that each can be deleted with its
folder.
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

# purpose → "module:function"
_FUNCTIONS = {
    "learning curve": "vit.analysis.learning_curve.curve:measure_learning_curve",
    "report section": "vit.analysis.learning_curve.section:build_section",
}


def find_product(purpose: str) -> Callable[..., Any] | None:
    """Return a product's function for a purpose; None where the product's folder was deleted."""
    name = _FUNCTIONS[purpose]
    try:
        function: Callable[..., Any] = resolve_name(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or "-"):
            raise
        return None
    return function
