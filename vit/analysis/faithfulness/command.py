"""The command `vit faithfulness`."""

from pathlib import Path

from vit.runtime.command import Call, Command
from vit.runtime.console import build_console, build_table
from vit.runtime.files import compute_and_save


def faithfulness(measure: Call, *, output: Path, overwrite: bool = False) -> None:
    """Measure which map methods are most faithful to a model.

    Writes faithfulness.md and faithfulness.json (also the gain of each image).

    Args:
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    result = compute_and_save(measure, output, overwrite=overwrite)
    rows = []
    for name in result.names:
        cells = [f"{cell} {'*' * is_best:1}" for cell, is_best in result.format_gains(name)]
        time = result.milliseconds.get(name)
        rows.append([name, *cells, "" if time is None else f"{time:.1f}"])
    console = build_console()
    headings = ("map", "tokens dropped", "filled with the mean", "ms")
    title = f"Symmetric relevance gain on {len(result.ids)} images"
    console.print(build_table(rows, headings, title=title))
    console.print(
        "Means and 95 % intervals. *: tied for best: "
        "the interval of the difference to the highest includes 0"
    )
    for note in result.notes:
        console.print(note)
    console.print(f"written to {output}")


COMMAND = Command(
    run=faithfulness,
    function="measure_faithfulness",
    python_only=("dataset", "class_names"),
    flags={"methods": "--method"},
)
