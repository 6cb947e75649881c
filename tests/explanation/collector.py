"""Explains images and hands each batch to observers."""

from collections.abc import Callable, Sequence

from vit.bundle import Bundle
from vit.explanation.explainer import Explainer
from vit.explanation.items import ImageItem
from vit.explanation.records import Explanations, ImageResult
from vit.options import ExplainOptions


def explain_with(
    bundle: Bundle,
    items: Sequence[ImageItem],
    options: ExplainOptions,
    *observers: Callable[[Sequence[ImageResult]], object],
    token_bytes: int = 0,
) -> Explanations:
    """Explain `items` and call `observers` with each batch."""
    return Explainer(bundle, options).explain(items, *observers, token_bytes=lambda: token_bytes)
