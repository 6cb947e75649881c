"""`vit export`: a model for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    """What an exported model is for."""

    TIMM = "timm"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"


def export(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    to: Annotated[Target, typer.Option(help="the form to write")],
    output: Annotated[Path, typer.Option(help="directory for the exported model")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier export")] = False,
) -> None:
    """Write a model for other programs, with the preprocessing and class names that it needs.

    timm: a folder that timm.create_model("local-dir:DIR", pretrained=True) opens. onnx: model.onnx;
    torch-export: model.pt2. Both take any number of normalised images to logits; model.json is beside them.
    """
    import json

    from vit.bundle import load_bundle
    from vit.export.formats import describe_for_timm, export_onnx, export_timm, export_torch
    from vit.model.vision_transformer import VisionTransformer
    from vit.runtime.files import write_text
    from vit.runtime.output_dir import prepare_output

    bundle = load_bundle(model)
    network = bundle.model
    if not isinstance(network, VisionTransformer):
        from vit.model.timm_weights import load_timm

        network = load_timm(network)
    preprocess = bundle.preprocess.to_dict()
    if to is Target.TIMM:  # refuses what timm hasn't, before an earlier export is replaced
        describe_for_timm(network, preprocess=preprocess, class_names=bundle.class_names)
    directory = prepare_output(output, overwrite=overwrite)
    if to is Target.TIMM:
        export_timm(network, directory, preprocess=preprocess, class_names=bundle.class_names)
        typer.echo(f'timm.create_model("local-dir:{directory}", pretrained=True) opens it')
        return
    if to is Target.ONNX:
        path = directory / "model.onnx"
        export_onnx(network, path)
    else:
        path = directory / "model.pt2"
        export_torch(network, path)
    facts = {
        "preprocess": preprocess,
        "class_names": list(bundle.class_names),
        "temperature": bundle.temperature,
        "sha256_of_source": bundle.sha256,
    }
    write_text(directory / "model.json", json.dumps(facts, indent=2) + "\n")
    typer.echo(
        f"{path} maps normalised images to logits; model.json beside it tells how to normalise and read them"
    )
