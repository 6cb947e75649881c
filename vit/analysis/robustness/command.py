"""The command `vit robustness`."""

from pathlib import Path

from vit.runtime.command import Call, Command
from vit.runtime.console import build_console, build_table
from vit.runtime.files import compute_and_save
from vit.runtime.numbers import format_percent


def robustness(measure: Call, *, output: Path, overwrite: bool = False) -> None:
    """Measure accuracy on damaged images.

    Writes robustness.json.

    Args:
        output: Directory for the result.
        overwrite: Replace an earlier result.
    """
    result = compute_and_save(measure, output, overwrite=overwrite)
    rows = [
        (name, *(format_percent(value, result.num_images) for value in values))
        for name, values in result.accuracies.items()
    ]
    top1 = format_percent(result.top1, result.num_images)
    title = f"Accuracy on {result.num_images:,} images: {top1} without damage"
    build_console().print(build_table(rows, ("damage", "light", "medium", "strong"), title=title))


COMMAND = Command(run=robustness, function="measure_robustness")
