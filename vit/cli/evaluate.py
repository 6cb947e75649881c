"""`vit evaluate`: metrics with confidence intervals, errors and their attention maps."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vit.evaluation.images import Images
    from vit.evaluation.result import Evaluation


def evaluate(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    output: Annotated[Path, typer.Option(help="directory for the metrics, the predictions and the report")],
    data: Annotated[
        str | None, typer.Option(help="a data set, folder or shards; default: what it was trained on")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="where that data set is")] = None,
    split: Annotated[
        str | None, typer.Option(help="train, validation, test or all; default: test, or all if it has none")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="fit a temperature on the validation split, into the model"),
    ] = False,
    corruptions: Annotated[
        bool, typer.Option("--corruptions", help="fifteen corruptions at five severities")
    ] = False,
    shift: Annotated[bool, typer.Option("--shift", help="move the images right and down")] = False,
    rotate: Annotated[bool, typer.Option("--rotate", help="rotate the images")] = False,
    mirrored: Annotated[
        bool,
        typer.Option(
            "--mirrored", help="test-time augmentation: mean logits of the image and its mirror image"
        ),
    ] = False,
    pictures: Annotated[
        int, typer.Option(min=0, help="errors, uncertain predictions and label errors to show, of each")
    ] = 16,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="default: 256, or on a CPU the 64 that its caches hold")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or auto")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier evaluation")] = False,
) -> None:
    """Measure a model on images it has not seen, and give 95 % confidence intervals.

    Writes evaluation.json and .md, predictions.csv, confusion.png and report.html.
    """
    from dataclasses import replace

    from vit.bundle import load_bundle
    from vit.data.open import open_for_model
    from vit.evaluation.evaluate import evaluate_bundle
    from vit.evaluation.images import load_images
    from vit.pages.report import PAGES
    from vit.runtime.device import choose_device, choose_precision
    from vit.runtime.memory import keep_freed_memory
    from vit.runtime.output_dir import check_output
    from vit.runtime.processes import join_processes

    check_output(output, overwrite=overwrite)
    if calibrate and (model.startswith("timm:") or split in ("validation", "all")):
        raise ValueError("--calibrate needs a model file to keep the temperature in, and --split test")
    with join_processes(device) as (process, device_name):
        chosen = choose_device(device_name)
        precision = choose_precision(precision, chosen)
        keep_freed_memory()
        bundle = load_bundle(model, device=chosen)

        dataset = open_for_model(data, root=root, trained_on=bundle.config.get("data", {}))

        def load(split: str | None) -> "Images":
            return load_images(
                dataset,
                split,
                preprocess=bundle.preprocess,
                class_names=bundle.class_names,
                progress=process.is_main,
            )

        result = evaluate_bundle(
            bundle,
            load(split),
            validation=load("validation") if calibrate else None,
            corruptions=corruptions,
            shift=shift,
            rotate=rotate,
            mirrored=mirrored,
            num_examples=pictures,
            batch_size=batch_size,
            precision=precision,
        )
    if result.is_main:
        replace(result, pages=PAGES).save(output, overwrite=overwrite)
        _show(result.evaluation, output)


def _show(evaluation: "Evaluation", output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, (low, high) in evaluation.intervals.items():
        table.add_row(name, f"{getattr(evaluation, name):.4f}", f"{low:.4f} … {high:.4f}")
    if evaluation.mean_corruption_error is not None:
        table.add_row("mean corruption error", f"{evaluation.mean_corruption_error:.4f}", "")
    console = Console(highlight=False)
    console.print(table)
    for sentence in evaluation.list_warnings():
        console.print(sentence, style="yellow", markup=False)
    console.print(f"open {output / 'report.html'} in a browser", markup=False)
