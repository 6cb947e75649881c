"""`vit.export_model`: a model, images on which it is measured, and its card."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

from vit.bundle import Bundle, ModelLike, keeps_mode, open_model
from vit.data.open import name_data, open_for_model
from vit.deploy.export.onnx_file import check_packages, export_onnx
from vit.deploy.export.python_formats import export_huggingface, export_timm
from vit.evaluation.images import load_images
from vit.evaluation.label_result import LabelEvaluation
from vit.evaluation.saved import find_evaluation
from vit.explanation.explainer import Explainer
from vit.explanation.items import find_items
from vit.explanation.render.overlay import save_overlay
from vit.model.timm_weights import load_timm
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.conformal import describe_limits
from vit.runtime.arguments import accept_old_names, check_arguments
from vit.runtime.documents import read_json
from vit.runtime.files import expand_home, replace_output, write_text
from vit.runtime.progress import show_progress

# classes that the card lists
_MAX_CLASSES = 100


@accept_old_names(to="format")
# operators of ONNX after version 25 don't run in onnxruntime
@check_arguments(batch_size=(1, None), opset=(17, 25))
@keeps_mode
def export_model(
    model: ModelLike,
    *,
    output: str | Path,
    format: Literal["onnx", "timm", "huggingface"] = "onnx",
    input: Literal["photo", "tensor"] = "photo",
    precision: Literal["float32", "float16", "int8"] = "float32",
    attention: bool = False,
    batch_size: int | None = None,
    opset: int = 20,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model for other programs, with a model card.

    Args:
        model: See `vit.evaluate`; one of this project or of timm.
        output: Directory for the results.
        format: "onnx", "timm" or "huggingface".
        input: Input of the ONNX file: "photo", uint8 pixels of any size, or
            "tensor", normalised images of the model's size.
        precision: Weights of the ONNX file, "float32", "float16" or "int8".
            The accuracy of int8 is measured and compared with float32.
        attention: Add attention rollout to the ONNX file as an output.
        batch_size: Images a batch that the ONNX file takes; None for any.
        opset: Version of the operators in the ONNX file, 17 to 25.
        data: Images on which int8 is measured, see `vit.evaluate`.
        root: See `vit.evaluate`.
        split: See `vit.evaluate`.
        overwrite: Replace an earlier export.

    Returns:
        The directory, or the path of model.onnx.

    Raises:
        ValueError: The format can't hold this model, or an option of ONNX is
            given with another format.
        FileExistsError: `output` holds files.

    Example:
        >>> path = vit.export_model("runs/digits", output="runs/digits-onnx")
        >>> path.name  # model.onnx
    """
    options = (input, precision, attention, batch_size, opset)
    if format != "onnx" and options != ("photo", "float32", False, None, 20):
        raise ValueError(
            "--input, --precision, --attention, --batch-size and --opset are options of --format onnx, "
            f"not of {format}"
        )
    bundle = open_model(model, device="cpu")
    # the exporters know the layers of this project alone
    if not isinstance(bundle.model, VisionTransformer):
        bundle = replace(bundle, model=load_timm(bundle.model))
    images = None
    if precision == "int8":
        # quantised weights may be less accurate, which is measured
        splits = open_for_model(data, root=root, recorded=bundle.recorded_images)
        decoded = load_images(bundle, splits, split)
        images = replace(decoded.dataset, labels=decoded.labels)

    # before the model is written
    if format == "onnx":
        check_packages()
    with (
        show_progress(f"writing {format}"),
        replace_output(output, overwrite=overwrite) as directory,
    ):
        if format == "onnx":
            path = export_onnx(
                bundle,
                directory,
                input=input,
                precision=precision,
                attention=attention,
                batch_size=batch_size,
                opset=opset,
                images=images,
            )
        else:
            writers = {"timm": export_timm, "huggingface": export_huggingface}
            path = writers[format](bundle, directory)
        # after the other files, some of which the card describes
        _write_card(directory, bundle, format)
    return expand_home(output) / path.relative_to(directory)


def _write_map(bundle: Bundle, path: Path) -> str | None:
    """Draw a test image and its attention rollout, where the data of the model is here.

    Returns:
        The result of the sanity check; None without an image.
    """
    try:
        (item,) = find_items(None, recorded=bundle.recorded_images, count=1)
    # the data may be on another machine: the card has no picture then
    except (OSError, ValueError):
        return None
    explainer = Explainer(bundle, ["rollout"], sanity_checks=True)
    explanations = explainer.explain([item])
    (values,) = explanations.maps["rollout"]
    ((check,),) = explanations.checks["rollout"]
    image, _ = item.read()
    save_overlay(path, image, values, preprocess=bundle.preprocess)
    return str(check)


def _write_card(directory: Path, bundle: Bundle, to: str) -> None:
    """Write README.md in Markdown with the YAML header of the Hub."""
    map_verdict = _write_map(bundle, directory / "map.png")
    evaluation = find_evaluation(bundle.name, bundle.sha256)
    # text that came with a model or its data may hold markup: it is quoted
    class_names = [_quote(name) for name in bundle.class_names]
    metrics = []
    if evaluation is not None:
        names: tuple[str, ...] = ("top1", "top5", "macro_f1", "ece")
        if isinstance(evaluation, LabelEvaluation):
            names = ("map", "roc_auc", "macro_f1", "micro_f1", "exact_match")
        metrics = [
            (name, getattr(evaluation, name), *evaluation.intervals[name])
            for name in names
            # with few classes top-5 says nothing
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
        task="image-classification" if class_names else "image-feature-extraction",
        headless=not class_names,
        # the Hub's names
        library={"onnx": "onnx", "timm": "timm", "huggingface": "transformers"}[to],
        onnx=read_json(directory / "model.json") if to == "onnx" else None,
        huggingface=read_json(directory / "config.json") if to == "huggingface" else None,
        image_size=bundle.preprocess.image_size,
        has_code=(directory / "timm_vit.py").exists(),
        map_verdict=map_verdict,
        parameters=sum(parameter.numel() for parameter in bundle.model.parameters()),
        class_names=class_names[:_MAX_CLASSES],
        bundle=bundle,
        data=name_data(bundle.data.get("name", ""), bundle.config.get("data", {}).get("root")),
        evaluation=evaluation,
        metrics=metrics,
        set_limits=describe_limits(bundle.metadata),
        warnings=evaluation.list_warnings() if evaluation else (),
    )
    write_text(directory / "README.md", re.sub(r"\n{3,}", "\n\n", text))


def _plain(text: object) -> str:
    """Return one line of Markdown in which nothing is a tag, a link or a heading."""
    one_line = " ".join(str(text).split())
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", one_line)


def _quote(text: object) -> str:
    """Return one line of code in Markdown."""
    return "`" + " ".join(str(text).replace("`", "'").split()) + "`"
