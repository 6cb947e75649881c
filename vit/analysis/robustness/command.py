"""The command `vit robustness`."""

from pathlib import Path
from typing import Any

from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table
from vit.runtime.numbers import format_percent


def robustness(result: Any, output: Path) -> None:
    """Measure accuracy on damaged images.

    Writes robustness.json.
    """
    rows = [
        (name, *(format_percent(value, result.num_images) for value in values))
        for name, values in result.accuracies.items()
    ]
    top1 = format_percent(result.top1, result.num_images)
    title = f"Accuracy on {result.num_images:,} images: {top1} without damage"
    build_console().print(build_table(rows, ("damage", "light", "medium", "strong"), title=title))


COMMAND = Command(run=robustness, function="measure_robustness", is_saved=True)
