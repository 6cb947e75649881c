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
        model: model.safetensors, a training directory or timm:NAME
        output: directory for the results
    """
    # torch, which `vit --help` does without
    from vit.factory.export_model import run_export

    path = run_export(model, output, options)
    program = path.with_name("predict.py")
    messages = {
        "onnx": f"{path} takes RGB pixels of any size; python {program} PHOTO predicts",
        "timm": f'timm.create_model("local-dir:{path}", pretrained=True) opens it; '
        "README.md says more",
        "huggingface": f"{path} opens in transformers, with trust_remote_code=True; "
        "README.md says how",
    }
    typer.echo(messages[options.to])
