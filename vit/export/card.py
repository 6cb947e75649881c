"""README.md of an export: a model card of what the model file and an evaluation beside it say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vit.bundle import Bundle
from vit.runtime.files import write_text

_METRICS = ("top1", "top5", "macro_f1", "ece")
_MOST_CLASSES = 100  # that are listed


@dataclass(frozen=True)
class CardFacts:
    """`evaluation`: the content of an evaluation.json of this model, and what it warns of. `draw` writes a map's
    picture to the path it is given."""

    evaluation: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()
    draw: Callable[[Path], None] | None = None


def write_card(directory: Path, bundle: Bundle, to: str, facts: Mapping[str, Any], card: CardFacts) -> None:
    """README.md in Markdown with the Hub's YAML header, and map.png. `facts` are those of model.json."""
    if card.draw is not None:
        card.draw(directory / "map.png")
    found, names = card.evaluation, [_quote(name) for name in bundle.class_names]
    metrics = [] if found is None else [name for name in _METRICS if name != "top5" or len(names) > 5]
    context = {
        "to": to,
        "library": {"onnx": "onnx", "timm": "timm", "huggingface": "transformers"}.get(to, "pytorch"),
        "facts": {"input": "normalised", "attention": False, "accuracy": None} | dict(facts),
        "has_code": (directory / "timm_vit.py").exists(),
        "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
        "names": names[:_MOST_CLASSES],
        "bundle": bundle,
        "evaluation": found,
        "metrics": [(name, found[name], *found["intervals"][name]) for name in metrics] if found else [],
        "card": card,
    }
    loader = PackageLoader("vit", "export/templates")
    # plain text: what comes from outside is quoted by `_quote`
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["quote"] = _quote
    write_text(directory / "README.md", environment.get_template("README.md.jinja").render(context))


def _quote(text: object) -> str:
    """As code in Markdown, on one line."""
    return "`" + " ".join(str(text).replace("`", "'").split()) + "`"
