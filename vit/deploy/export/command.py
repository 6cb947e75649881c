"""The command `vit export`."""

from vit.runtime.command import Call, Command
from vit.runtime.console import echo


def export(write: Call) -> None:
    """Write a model for other programs, with a model card.

    The README.md that it writes says how to open the model.
    """
    path = write()
    folder = path if path.is_dir() else path.parent
    echo(f"{path} is written; {folder / 'README.md'} says how to open it")


COMMAND = Command(run=export, function="export_model")
