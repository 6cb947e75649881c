"""Explain images, and write them, with settings of `vit.explain`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit.bundle import Bundle
from vit.explanation.explain import describe_parameters
from vit.explanation.explainer import Explainer
from vit.explanation.items import ImageItem
from vit.explanation.records import Explanations, ImageResult
from vit.explanation.writer import MapWriter


def explain_with(
    bundle: Bundle,
    items: Sequence[ImageItem],
    settings: Mapping[str, Any],
    *observers: Callable[[Sequence[ImageResult]], object],
    token_bytes: int = 0,
) -> Explanations:
    """Explain `items` and call `observers` with each batch."""
    explainer, scale = build_explainer(bundle, settings)
    return explainer.explain(items, *observers, scale=scale, token_bytes=lambda: token_bytes)


def build_explainer(bundle: Bundle, settings: Mapping[str, Any]) -> tuple[Explainer, str]:
    """An explainer, and the scale of its colours."""
    chosen = dict(settings)
    scale = chosen.pop("scale", "image")
    return Explainer(bundle, **chosen), scale


def build_writer(
    output: Path, bundle: Bundle, settings: Mapping[str, Any], **files: Any
) -> MapWriter:
    """A writer for images that are explained with these settings."""
    explainer, scale = build_explainer(bundle, settings)
    target = settings.get("target", "auto")
    parameters = describe_parameters(explainer, target, scale, "smooth") | {
        "batch_size": settings.get("batch_size"),
        "precision": settings.get("precision", "float32"),
    }
    return MapWriter(output, bundle, parameters, **files)
