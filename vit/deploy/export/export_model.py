"""`vit.export_model`: a model, images on which it is measured, and its card."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from vit.bundle import Bundle, ModelLike, keeps_mode, open_model
from vit.data.dataset import ImageDataset
from vit.data.open import open_for_model
from vit.deploy.export.card import write_card
from vit.deploy.export.onnx_file import check_packages, export_onnx
from vit.deploy.export.python_formats import export_huggingface, export_timm
from vit.evaluation.images import load_images
from vit.evaluation.schema import find_evaluation
from vit.explanation.explainer import Explainer
from vit.explanation.items import find_items
from vit.explanation.render.overlay import save_overlay
from vit.model.timm_weights import load_timm
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import check_arguments
from vit.runtime.files import prepare_output


@check_arguments()
@keeps_mode
def export_model(
    model: ModelLike,
    *,
    output: str | Path,
    to: Literal["onnx", "timm", "huggingface"] = "onnx",
    precision: Literal["float32", "int8"] = "float32",
    attention: bool = False,
    data: str | Path | None = None,
    root: str | Path | None = None,
    split: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model for other programs, with a model card.

    Args:
        model: See `vit.evaluate`; one of this project or of timm.
        output: Directory for the results.
        to: Form of the model: "onnx", "timm" or "huggingface".
        precision: Weights of the ONNX file, "float32" or "int8". The accuracy
            of int8 is measured and compared with float32.
        attention: Add attention rollout to the ONNX file as a second output.
        data: Images on which int8 is measured, see `vit.evaluate`.
        root: See `vit.evaluate`.
        split: See `vit.evaluate`.
        overwrite: Replace an earlier export.

    Returns:
        The directory, or the path of model.onnx.

    Raises:
        ValueError: The form can't hold this model, or an option of ONNX is
            given with another form.
        FileExistsError: `output` holds files.

    Example:
        >>> path = vit.export_model("runs/digits", output="runs/digits-onnx")
        >>> path.name  # model.onnx
    """
    if to != "onnx" and (precision != "float32" or attention):
        raise ValueError(f"--precision and --attention are options of --to onnx, not of {to}")
    bundle = open_model(model, device="cpu")
    if not isinstance(bundle.model, VisionTransformer):
        bundle = replace(bundle, model=load_timm(bundle.model))
    images = _load_images(bundle, data, root, split) if precision == "int8" else None

    # before an earlier export is replaced
    if to == "onnx":
        check_packages()
    directory = prepare_output(output, overwrite=overwrite)
    if to == "onnx":
        path = export_onnx(
            bundle, directory, precision=precision, attention=attention, images=images
        )
    else:
        path = {"timm": export_timm, "huggingface": export_huggingface}[to](bundle, directory)

    evaluation = find_evaluation(bundle.name, bundle.sha256)
    write_card(
        directory,
        bundle,
        to,
        map_verdict=_write_map(bundle, directory / "map.png"),
        evaluation=evaluation.model_dump(mode="json") if evaluation else None,
        warnings=evaluation.list_warnings() if evaluation else (),
    )
    return path


def _load_images(
    bundle: Bundle, data: str | Path | None, root: str | Path | None, split: str | None
) -> ImageDataset:
    """Decode the images on which the accuracy is measured."""
    decoded = load_images(
        open_for_model(data, root=root, trained_on=bundle.config.get("data", {})),
        split,
        preprocess=bundle.preprocess,
        class_names=bundle.class_names,
        progress=True,
    )
    return replace(decoded.dataset, labels=decoded.labels)


def _write_map(bundle: Bundle, path: Path) -> str | None:
    """Draw a test image and its attention rollout, where the data of the model is here.

    Returns:
        The result of the sanity check; None without an image.
    """
    try:
        (item,) = find_items(None, trained_on=bundle.config.get("data", {}), count=1)
    except (OSError, ValueError):
        return None
    explainer = Explainer(bundle, ["rollout"], sanity_checks=True)
    explanations = explainer.explain([item])
    (values,) = explanations.maps["rollout"]
    ((check,),) = explanations.sanity_checks["rollout"]
    image, _ = item.read()
    save_overlay(path, image, values, preprocess=bundle.preprocess)
    return str(check)
