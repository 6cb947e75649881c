"""`vit export`: a model for other programs."""

from typing import Annotated, Any, Literal

import typer

from vit.cli.common import Data, Model, Output, Overwrite, Root, Split


def export(
    model: Model,
    *,
    output: Output,
    to: Annotated[
        Literal["onnx", "timm", "huggingface", "torch-export"], typer.Option(help="the form to write")
    ] = "onnx",
    input: Annotated[
        Literal["uint8", "float32", "normalised"], typer.Option(help="of onnx: pixels of 0 to 255, or what vit takes")
    ] = "uint8",
    precision: Annotated[
        Literal["float32", "float16", "int8"], typer.Option(help="of onnx's weights; smaller ones are evaluated")
    ] = "float32",
    attention: Annotated[bool, typer.Option("--attention", help="of onnx: rollout maps as a second output")] = False,
    data: Data = None,
    root: Root = None,
    split: Split = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a model for other programs, with its preprocessing and class names, and a model card.

    onnx: model.onnx takes RGB pixels of any size to probabilities; python predict.py PHOTO prints them, without vit
    and torch. timm: a folder that timm.create_model("local-dir:DIR", pretrained=True) opens. huggingface: one for
    transformers, with trust_remote_code=True. torch-export: model.pt2, normalised images to logits.
    """
    from vit.build.export_model import export_model

    where: dict[str, Any] = {"data": data, "root": root, "split": split}
    options: dict[str, Any] = {"to": to, "input": input, "precision": precision, "attention": attention}
    path = export_model(model, output=output, overwrite=overwrite, **options, **where)
    how = {
        "onnx": f"{path} takes RGB pixels of any size; python {path.with_name('predict.py')} PHOTO predicts",
        "timm": f'timm.create_model("local-dir:{path}", pretrained=True) opens it; README.md says more',
        "huggingface": f"{path} opens in transformers, with trust_remote_code=True; README.md says how",
    }
    without = f"{path} maps normalised images to logits; model.json beside it tells how to normalise and read them"
    typer.echo(without if input == "normalised" else how.get(to, without))
