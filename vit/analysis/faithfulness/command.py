"""`vit faithfulness`: how faithful each kind of attention map is to the model."""

from pathlib import Path
from typing import TYPE_CHECKING

from vit.options import FaithfulnessOptions
from vit.runtime.console import build_console, build_table

if TYPE_CHECKING:
    from vit.analysis.faithfulness.result import FaithfulnessResult

OPERATORS = {
    "srg": "with tokens dropped",
    "srg_mean": "with patches filled with the mean",
    "srg_blur": "with patches blurred",
}


def faithfulness(
    model: str, *, output: Path, options: FaithfulnessOptions, overwrite: bool = False
) -> None:
    """Measure how faithful each kind of map is to the model, beside maps that don't depend on it.

    Patches are removed in a map's order while the probability of the class is measured; maps are
    also compared with leave-one-out occlusion and with those of randomised weights. Writes
    faithfulness.json, .md, .png and .npz (the numbers of every image) and, where all methods are
    measured, model.faithfulness.json beside the model file, for vit explain --method best.

    Args:
        model: model.safetensors, a training directory, timm:NAME or imagenette
        output: directory for the results
        overwrite: replace an earlier result
    """
    # torch, which `vit --help` does without
    from vit import api
    from vit.runtime.files import check_output

    # before minutes of work
    check_output(output, overwrite=overwrite)
    result = api.measure_faithfulness(model, **vars(options))
    result.save(output, overwrite=overwrite)
    _show(result, output)


def _show(result: "FaithfulnessResult", output: Path) -> None:
    """What fits into 80 characters a line; faithfulness.md has every column."""
    from vit.analysis.faithfulness.result import format_estimate

    rows = []
    milliseconds = result.summary["milliseconds_per_image"]
    for name in result.names:
        cells = [name]
        for metric in ("srg", "srg_mean"):
            estimates = result.summary["metrics"][metric]
            mark = " *" if name in estimates["best"] else "  "
            cells.append(format_estimate(estimates["methods"][name]) + mark)
        cells.append(f"{milliseconds[name]:.1f}" if name in milliseconds else "")
        rows.append(cells)

    console = build_console()
    headings = ("map", "tokens dropped", "filled with the mean", "ms")
    title = f"Symmetric relevance gain on {len(result.ids)} images"
    console.print(build_table(rows, headings, title=title))
    console.print(
        "95 % intervals. *: perhaps the best; "
        "the interval of its difference to the highest includes 0"
    )
    for metric, operator in OPERATORS.items():
        lower = result.summary["metrics"][metric]["below_centre"]
        if lower:
            console.print(f"{operator}, the centre of the image beats {', '.join(lower)}")
    for note in result.measurement.notes:
        console.print(note)
    console.print(f"every metric: {output / 'faithfulness.md'}")
