"""`vit export`: a model for other programs."""

from pathlib import Path

import typer

from vit.options import ExportOptions


def export(model: str, *, output: Path, options: ExportOptions) -> None:
    """Write a model for other programs, with its preprocessing and class names, and a model card.

    onnx: model.onnx takes RGB pixels of any size to probabilities; python predict.py PHOTO prints
    them, without vit and torch. timm: a folder that timm.create_model("local-dir:DIR",
    pretrained=True) opens. huggingface: one for transformers, with trust_remote_code=True.

    Args:
        model: model.safetensors, a training directory, timm:NAME or imagenette
        output: directory for the results
    """
    # torch, which `vit --help` does without
    from vit.deploy.export.run import export_model

    path = export_model(model, output=output, **vars(options))
    typer.echo(f"{path} is written; {output / 'README.md'} says how to open it")
