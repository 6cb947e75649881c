"""The command `vit faithfulness`."""

from pathlib import Path

from vit.runtime.command import Call, Command
from vit.runtime.console import build_console, build_table
from vit.runtime.files import compute_and_save


def faithfulness(measure: Call, *, output: Path, overwrite: bool = False) -> None:
    """Measure which map methods are most faithful to a model.

    Writes faithfulness.json, also with the gain of each image.

    Args:
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    from vit.analysis.faithfulness.result import HEADINGS  # it imports torch

    result = compute_and_save(measure, output, overwrite=overwrite)
    console = build_console()
    title = f"Symmetric relevance gain on {len(result.ids)} images"
    console.print(build_table(result.rows, HEADINGS, title=title))
    console.print(
        "Means and 95 % intervals. *: tied for best: "
        "the interval of the difference to the highest includes 0"
    )
    for note in (*result.notes, f"written to {output}"):
        console.print(note)


COMMAND = Command(
    run=faithfulness,
    function="measure_faithfulness",
    python_only=("dataset", "class_names"),
    flags={"methods": "--method"},
)
