"""`vit export` from Python: a model, the images to measure it on, and its card, brought
together."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import nn

from vit.bundle import Bundle, load_model
from vit.data.open import open_for_model
from vit.deploy.export.card import write_card
from vit.deploy.export.formats import Form, export_bundle
from vit.deploy.export.onnx_file import WeightPrecision
from vit.evaluation.images import load_images
from vit.evaluation.schema import find_evaluation
from vit.explanation.explainer import Explainer
from vit.explanation.items import ImageItem, find_items
from vit.explanation.methods.rollout import LogitsAndRollout
from vit.explanation.render.overlay import save_overlay
from vit.model.timm_weights import load_timm
from vit.model.vision_transformer import VisionTransformer
from vit.options import ExplainOptions
from vit.runtime.files import expand_home


def export_model(
    model: str | Path | Bundle | nn.Module,
    *,
    output: str | Path,
    to: Form = "onnx",
    precision: WeightPrecision = "float32",
    attention: bool = False,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model for other programs, with a model card.

    Args:
        model: A path, `timm:NAME`, a bundle, or a module of ours or timm's.
        output: The directory to write.
        to: "onnx", "timm" or "huggingface".
        precision: Of ONNX's weights, "float32" or "int8".
        attention: Of ONNX: the rollout's maps as a second output.
        data: The images on which the accuracy of int8 is measured beside that of float32, as in
            `vit.evaluate`; None: what the model was trained on.
        root: Where the data set that `data` names is.
        split: As in `vit.evaluate`.
        overwrite: Replace an earlier export.

    Returns:
        The directory, or the path of model.onnx.

    Raises:
        ValueError: for what the form can't hold, and options of ONNX with another form.
        FileExistsError: where `output` holds files.

    Example:
        >>> path = vit.export_model("runs/digits", output="runs/digits-onnx")
        >>> path.name  # model.onnx
    """
    if to != "onnx" and (precision != "float32" or attention):
        raise ValueError(f"--precision and --attention are options of onnx, not of {to}")
    directory = expand_home(output)
    bundle = load_model(model)
    net = bundle.model
    if not isinstance(net, VisionTransformer):
        net = load_timm(net)
        bundle = replace(bundle, model=net)

    # int8 changes the answers: its accuracy is measured beside that of float32
    trained_on = bundle.config.get("data", {})
    images = None
    if precision == "int8":
        decoded = load_images(
            open_for_model(data, root=root, trained_on=trained_on),
            split,
            preprocess=bundle.preprocess,
            class_names=bundle.class_names,
            progress=True,
        )
        images = replace(decoded.dataset, labels=decoded.labels)
    path = export_bundle(
        bundle,
        to,
        directory,
        precision=precision,
        with_maps=LogitsAndRollout(net) if attention else None,
        images=images,
        overwrite=overwrite,
    )

    # the card shows a test image and its rollout, where the data is here
    items: list[ImageItem] = []
    with suppress(OSError, ValueError):
        items = find_items(None, trained_on=trained_on, count=1)
    verdict = None
    for item in items:
        explainer = Explainer(bundle, ExplainOptions(methods=("rollout",), sanity_checks=True))
        explanations = explainer.explain([item])
        (values,) = explanations.maps["rollout"]
        ((check,),) = explanations.sanity_checks["rollout"]
        verdict = str(check)
        image, _ = item.read()
        save_overlay(directory / "map.png", image, values, preprocess=bundle.preprocess)
    evaluation = find_evaluation(bundle.name, bundle.sha256)
    write_card(
        directory,
        bundle,
        to,
        map_verdict=verdict,
        evaluation=evaluation.model_dump(mode="json") if evaluation else None,
        warnings=evaluation.list_warnings() if evaluation else (),
    )
    return path
