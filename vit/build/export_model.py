"""`vit export` from Python: a model, the images to measure it on, and its card, brought together."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vit.bundle import Bundle, load_model
from vit.data.open import open_for_model
from vit.evaluation.evaluated_images import load_images
from vit.evaluation.schema import find_evaluation
from vit.explanation.explain import explain_images
from vit.explanation.items import ImageItem, find_items
from vit.explanation.methods.traced_rollout import LogitsAndRollout
from vit.explanation.render.overlay import save_overlay
from vit.export.card import CardFacts
from vit.export.formats import Form, export_bundle
from vit.export.onnx_file import Input, OnnxOptions, WeightPrecision
from vit.model.timm_weights import load_timm
from vit.model.vision_transformer import VisionTransformer


def export_model(
    model: str | Path | Bundle | nn.Module,
    *,
    output: str | Path,
    to: Form = "onnx",
    input: Input = "uint8",
    precision: WeightPrecision = "float32",
    attention: bool = False,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model for other programs into the directory `output`, in the form `to`,
    with a model card. The path of the directory, or of the file for ONNX and torch-export.

    For ONNX, `input` and `precision` are those of `OnnxOptions`, and `attention` adds the rollout's maps as a second
    output. Of float16 and int8 the accuracy is measured on `data`, as in `evaluate`, beside that of float32.

    Raises ValueError for what the form can't hold, FileExistsError where `output` holds files.
    """
    if to != "onnx" and (input, precision, attention) != ("uint8", "float32", False):
        raise ValueError(f"--input, --precision and --attention are options of onnx, not of {to}")
    bundle = load_model(model)
    net = bundle.model if isinstance(bundle.model, VisionTransformer) else load_timm(bundle.model)
    bundle, images = replace(bundle, model=net), None
    if precision != "float32":
        dataset = open_for_model(data, root=root, trained_on=bundle.config.get("data", {}))
        of_model: dict[str, Any] = {"preprocess": bundle.preprocess, "class_names": bundle.class_names}
        found = load_images(dataset, split, **of_model, progress=True)
        images = replace(found.dataset, labels=found.labels)
    options = OnnxOptions(input, precision, LogitsAndRollout(net) if attention else None)
    evaluation, draw = find_evaluation(bundle.name, bundle.sha256), None
    try:
        (item,) = find_items(None, trained_on=bundle.config.get("data", {}), count=1)
    except (OSError, ValueError):  # its data isn't here: the card has no picture
        pass
    else:
        draw = partial(_draw_map, bundle, item)
    content = None if evaluation is None else evaluation.model_dump(mode="json")
    card = CardFacts(content, [] if evaluation is None else evaluation.list_warnings(), draw)
    return export_bundle(bundle, to, Path(output), options=options, images=images, card=card, overwrite=overwrite)


def _draw_map(bundle: Bundle, item: ImageItem, path: Path) -> None:
    image, _ = item.read()
    (values,) = explain_images(bundle, image).maps
    save_overlay(path, image, values, preprocess=bundle.preprocess)
