"""The command `vit faithfulness`."""

from pathlib import Path

from vit.runtime.command import Call, Command
from vit.runtime.console import build_console, build_table
from vit.runtime.files import compute_and_save

_GAINS = {
    "srg": "with tokens dropped",
    "srg_mean": "with patches filled with the mean",
    "srg_blur": "with patches blurred",
}


def faithfulness(measure: Call, *, output: Path, overwrite: bool = False) -> None:
    """Measure which map methods are most faithful to a model.

    Writes faithfulness.json, .md, .png and .npz (every image).

    Args:
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    # torch, which `vit --help` does without
    from vit.analysis.faithfulness.result import format_estimate, format_time

    result = compute_and_save(measure, output, overwrite=overwrite)
    # these columns fit into 80 characters; faithfulness.md has all
    rows = []
    milliseconds = result.summary["milliseconds_per_image"]
    for name in result.names:
        cells = [name]
        for metric in ("srg", "srg_mean"):
            estimates = result.summary["metrics"][metric]
            mark = "*" * (name in estimates["best"])
            cells.append(f"{format_estimate(estimates['methods'][name])} {mark:1}")
        cells.append(format_time(milliseconds, name))
        rows.append(cells)

    console = build_console()
    headings = ("map", "tokens dropped", "filled with the mean", "ms")
    title = f"Symmetric relevance gain on {len(result.ids)} images"
    console.print(build_table(rows, headings, title=title))
    console.print(
        "Means and 95 % intervals. *: tied for best: "
        "the interval of the difference to the highest includes 0"
    )
    for metric, operator in _GAINS.items():
        lower = result.summary["metrics"][metric]["below_centre"]
        if lower:
            console.print(f"{operator}, the centre of the image beats {', '.join(lower)}")
    for note in result.measurement.notes:
        console.print(note)
    console.print(f"every metric: {output / 'faithfulness.md'}")


COMMAND = Command(
    run=faithfulness,
    function="measure_faithfulness",
    python_only=("dataset", "class_names"),
    flags={"target": "--class", "methods": "--method"},
    old_flags={"--images": "--num-images", "--methods": "--method"},
    help={
        "methods": "all, or names separated by commas.",
        "target": "Class to explain: auto (the true class of images predicted correctly), or one of"
        " vit explain --class.",
    },
)
