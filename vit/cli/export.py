"""`vit export`: a model for other programs."""

from typing import Annotated, Literal

import typer

from vit.cli.common import Model, Output, Overwrite


def export(
    model: Model,
    *,
    to: Annotated[Literal["timm", "onnx", "torch-export"], typer.Option(help="the form to write")],
    output: Output,
    overwrite: Overwrite = False,
) -> None:
    """Write a model for other programs, with the preprocessing and class names that it needs.

    timm: a folder that timm.create_model("local-dir:DIR", pretrained=True) opens. onnx: model.onnx;
    torch-export: model.pt2. Both take any number of normalised images to logits; model.json is beside them.
    """
    from vit.bundle import load_bundle
    from vit.export.formats import export_bundle

    path = export_bundle(load_bundle(model), to, output, overwrite=overwrite)
    how = f"{path} maps normalised images to logits; model.json beside it tells how to normalise and read them"
    typer.echo(f'timm.create_model("local-dir:{path}", pretrained=True) opens it' if to == "timm" else how)
