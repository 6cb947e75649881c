"""`vit faithfulness`: how faithful each kind of attention map is to the model, measured beside baselines."""

from typing import Annotated, Any

import typer

from vit.cli.common import Data, Device, Model, Output, Overwrite, RandomWeights, Root, Split


def faithfulness(
    model: Model,
    *,
    output: Output,
    data: Data = None,
    root: Root = None,
    split: Split = None,
    methods: Annotated[str, typer.Option(help="all, or names separated by commas")] = "all",
    count: Annotated[int, typer.Option("--images", min=8, help="correctly predicted images to measure on")] = 256,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    seed: Annotated[int, typer.Option(help="of the choice of images and of random maps")] = 0,
    device: Device = "auto",
    random_weights: RandomWeights = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure how faithful each kind of map is to the model, beside maps that don't depend on it.

    Patches are removed in a map's order while the probability of the class is measured; maps are also compared
    with leave-one-out occlusion and with those of randomised weights, under noise, and on mosaics of four classes.
    Writes faithfulness.json, .md, .png and .npz (the numbers of every image).
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from vit import api
    from vit.runtime.output_dir import check_output

    check_output(output, overwrite=overwrite)
    names = methods if methods == "all" else methods.split(",")
    images: dict[str, Any] = {"data": data, "root": root, "split": split, "count": count, "seed": seed}
    running: dict[str, Any] = {"batch_size": batch_size, "device": device, "random_weights": random_weights}
    result = api.measure_faithfulness(model, methods=names, **images, **running)
    result.save(output, overwrite=overwrite)
    console = Console(highlight=False)
    console.print(Markdown(result.table))
    for note in result.measurement.notes:
        console.print(note, markup=False)
    console.print(f"{len(result.ids)} images measured: {output}", markup=False)
