"""README.md of an export: a model card made from the model file and an evaluation next to it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from vit.bundle import Bundle
from vit.runtime.documents import read_json
from vit.runtime.files import write_text

_LIBRARIES = {"onnx": "onnx", "timm": "timm", "huggingface": "transformers"}
_METRICS = ("top1", "top5", "macro_f1", "ece")
# classes that are listed
_MAX_CLASSES = 100


def write_card(
    directory: Path,
    bundle: Bundle,
    to: str,
    *,
    map_verdict: str | None,
    evaluation: Mapping[str, Any] | None,
    warnings: Sequence[str],
) -> None:
    """Write README.md in Markdown with the YAML header of the Hub.

    Args:
        directory: Folder of the export with its other files, such as map.png.
        bundle: The model.
        to: Form of the export.
        map_verdict: Result of the sanity check of map.png; None without a map.
        evaluation: Content of an evaluation.json of this model.
        warnings: Warnings of that evaluation.
    """
    # text that came with a model or its data may hold markup: it is quoted
    class_names = [_quote(name) for name in bundle.class_names]
    metrics = []
    if evaluation is not None:
        metrics = [
            (name, evaluation[name], *evaluation["intervals"][name])
            for name in _METRICS
            if name != "top5" or len(class_names) >= 10
        ]
    environment = Environment(
        loader=PackageLoader("vit", "deploy/export/templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = _quote
    environment.filters["plain"] = _plain
    text = environment.get_template("README.md.jinja").render(
        to=to,
        library=_LIBRARIES[to],
        onnx=read_json(directory / "model.json") if to == "onnx" else None,
        image_size=bundle.preprocess.image_size,
        has_code=(directory / "timm_vit.py").exists(),
        map_verdict=map_verdict,
        parameters=sum(parameter.numel() for parameter in bundle.model.parameters()),
        class_names=class_names[:_MAX_CLASSES],
        bundle=bundle,
        evaluation=evaluation,
        metrics=metrics,
        warnings=warnings,
    )
    write_text(directory / "README.md", text)


def _plain(text: object) -> str:
    """Return one line of Markdown in which nothing is a tag, a link or a heading."""
    one_line = " ".join(str(text).split())
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", one_line)


def _quote(text: object) -> str:
    """Return one line of code in Markdown."""
    return "`" + " ".join(str(text).replace("`", "'").split()) + "`"
