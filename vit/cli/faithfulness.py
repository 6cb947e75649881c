"""`vit faithfulness`: how faithful each kind of attention map is to the model, measured beside baselines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit.cli.common import Batch, Data, Device, Model, Output, Overwrite, RandomWeights, Root, Split, build_console

if TYPE_CHECKING:
    from vit.explanation.faithfulness.faithfulness_result import FaithfulnessResult


def faithfulness(
    model: Model,
    *,
    output: Output,
    data: Data = None,
    root: Root = None,
    split: Split = None,
    methods: Annotated[str, typer.Option(help="all, or names separated by commas")] = "all",
    count: Annotated[int, typer.Option("--images", min=8, help="correctly predicted images to measure on")] = 128,
    batch_size: Batch = None,
    seed: Annotated[int, typer.Option(help="of the choice of images and of random maps")] = 0,
    device: Device = "auto",
    random_weights: RandomWeights = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure how faithful each kind of map is to the model, beside maps that don't depend on it.

    Patches are removed in a map's order while the probability of the class is measured; maps are also compared
    with leave-one-out occlusion and with those of randomised weights, under noise, and on mosaics of four classes.
    Writes faithfulness.json, .md, .png and .npz (the numbers of every image) and, where all methods are measured,
    model.faithfulness.json beside the model file, for vit attention --method best.
    """
    from vit import api
    from vit.runtime.output_dir import check_output

    check_output(output, overwrite=overwrite)
    names = methods if methods == "all" else methods.split(",")
    images: dict[str, Any] = {"data": data, "root": root, "split": split, "count": count, "seed": seed}
    running: dict[str, Any] = {"batch_size": batch_size, "device": device, "random_weights": random_weights}
    result = api.measure_faithfulness(model, methods=names, **images, **running, on_start=_announce)
    result.save(output, overwrite=overwrite)
    _show(result, output)


def _announce(seconds: float) -> None:
    about = f"{max(seconds, 1):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    typer.echo(f"measuring takes about {about}", err=True)


def _show(result: "FaithfulnessResult", output: Path) -> None:
    """What fits into 80 characters a line; faithfulness.md has every column."""
    from rich.table import Table

    from vit.explanation.faithfulness.faithfulness_result import format_estimate

    console, summary = build_console(), result.summary
    table = Table(title=f"Symmetric relevance gain on {len(result.ids)} images", box=None, pad_edge=False)
    columns = {"srg": "tokens dropped", "srg_mean": "filled with the mean"}
    for heading in ("map", *columns.values(), "ms"):
        table.add_column(heading, justify="left" if heading == "map" else "right", no_wrap=True)
    for name in result.names:
        found = [summary["metrics"][metric] for metric in columns]
        cells = [format_estimate(of["methods"][name]) + (" *" if name in of["best"] else "  ") for of in found]
        milliseconds = summary["milliseconds_per_image"].get(name)
        table.add_row(name, *cells, "" if milliseconds is None else f"{milliseconds:.1f}")
    console.print(table)
    console.print("95 % intervals. *: perhaps the best; the interval of its difference to the highest includes 0")
    for note in result.measurement.notes:
        console.print(note)
    console.print(f"every metric: {output / 'faithfulness.md'}")
