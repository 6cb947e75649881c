"""The command `vit export`."""

from vit.runtime.command import Call, Command
from vit.runtime.console import echo


def export(write: Call) -> None:
    """Write a model for other programs, with a model card.

    onnx: model.onnx takes RGB pixels of any size to probabilities; python predict.py PHOTO prints
    them without vit and torch. timm: timm.create_model("local-dir:DIR", pretrained=True) opens it.
    huggingface: transformers opens it with trust_remote_code=True. Each has the preprocessing and
    class names.
    """
    path = write()
    folder = path if path.is_dir() else path.parent
    echo(f"{path} is written; {folder / 'README.md'} says how to open it")


COMMAND = Command(run=export, function="export_model", old_flags={"--to": "--format"})
