"""The command `vit faithfulness`."""

from pathlib import Path
from typing import Any

from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table


def faithfulness(result: Any, output: Path) -> None:
    """Measure which map methods are most faithful to a model.

    Writes faithfulness.json, also with the gain of each image.
    """
    from vit.analysis.faithfulness.result import HEADINGS  # it imports torch

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
    is_saved=True,
    flags={"methods": "--method"},
)
