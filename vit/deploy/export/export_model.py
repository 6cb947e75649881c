"""`vit.export_model`: a model for other programs, and its card."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from vit.bundle import ModelLike, keeps_mode, open_model, require_classifier
from vit.deploy.export.card import build_card
from vit.deploy.export.onnx_file import ONNX_FILE, build_onnx_files
from vit.deploy.export.timm_folder import build_timm_files
from vit.model.model_info import is_of
from vit.model.modules import load_timm
from vit.runtime.arguments import check_choice
from vit.runtime.files import check_output, expand_home, open_output, write_atomically
from vit.runtime.progress import show_progress


@keeps_mode
def export_model(
    model: ModelLike,
    *,
    output: str | Path,
    format: Literal["onnx", "timm"] = "onnx",
    attention: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a model for other programs, with a model card.

    Args:
        model: See `vit.evaluate`; one of this project or of timm.
        output: Directory for the results.
        format: "onnx", or "timm": a folder that transformers opens, too.
        attention: Add attention rollout to the ONNX file as an output.
        overwrite: Replace an earlier export.

    Returns:
        The directory, or the path of model.onnx.

    Raises:
        ValueError: The model has no classifier, the format can't hold it, or
            `attention` is given with another format than ONNX.
        FileExistsError: `output` holds files.

    Example:
        >>> path = vit.export_model("runs/digits", output="runs/digits-onnx")
        >>> path.name  # model.onnx
    """
    check_choice(format, ("onnx", "timm"), name="format")
    if attention and format != "onnx":
        raise ValueError(f"--attention is an option of --format onnx, not of {format}")
    bundle = open_model(model, device="cpu")
    require_classifier(bundle)
    # The exporters know the layers of this project; ONNX holds those of timm, too.
    if attention or format != "onnx" or not is_of(bundle.model, "timm"):
        bundle = replace(bundle, model=load_timm(bundle.model))
    check_output(expand_home(output), overwrite=overwrite, sources=(bundle.name,))
    # a model that the format can't hold is refused before anything is written
    with show_progress(f"writing {format}"):
        if format == "onnx":
            files = build_onnx_files(bundle, attention=attention)
        else:
            files = build_timm_files(bundle)
        files["README.md"] = build_card(bundle, format=format, attention=attention)
        directory = open_output(output, overwrite=overwrite)
        for name, content in files.items():
            write_atomically(directory / name, content)
    return directory / ONNX_FILE if format == "onnx" else directory
