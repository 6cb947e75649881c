"""`vit evaluate`: how good a model is, how sure that is, where it fails and what it looked at there."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vit.bundle import Bundle
    from vit.evaluation.cost import Cost
    from vit.evaluation.images import Images
    from vit.evaluation.metrics import Scores
    from vit.evaluation.predictor import Predictor
    from vit.evaluation.result import Evaluation
    from vit.evaluation.robustness import Sweep
    from vit.runtime.processes import Process


def evaluate(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    output: Annotated[Path, typer.Option(help="directory for the figures, the predictions and the report")],
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
        bool, typer.Option("--corruptions", help="fifteen kinds of damage at five severities")
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
        int, typer.Option(min=0, help="mistakes, close calls and label errors to show, of each")
    ] = 16,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="default: 256, or on a CPU the 64 that its caches hold")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier evaluation")] = False,
) -> None:
    """Measure a model on images it has not seen, and say how sure the figures are.

    Writes evaluation.json and .md, predictions.csv, confusion.png and report.html.
    """
    from vit.bundle import load_bundle
    from vit.evaluation.images import find_source, load_images
    from vit.evaluation.predictor import Predictor
    from vit.evaluation.summary import summarize
    from vit.runtime.device import choose_device, choose_precision
    from vit.runtime.memory import keep_freed_memory
    from vit.runtime.output_dir import check_output
    from vit.runtime.processes import join_processes

    check_output(output, overwrite=overwrite)
    if calibrate and (model.startswith("timm:") or split in ("validation", "all")):
        raise ValueError("--calibrate needs a model file to keep the temperature in, and --split test")
    with join_processes(device) as (process, device_name):
        chosen = choose_device(device_name)
        keep_freed_memory()
        bundle = load_bundle(model, device=chosen)
        predictor = Predictor(
            model=bundle.model,
            preprocess=bundle.preprocess,
            num_classes=len(bundle.class_names),
            batch_size=batch_size or (64 if chosen.type == "cpu" else 256),
            device=chosen,
            precision=choose_precision(precision, chosen),
            mirrored=mirrored,
        )

        def load(part: str | None) -> "Images":
            trained_on = bundle.config.get("data", {})
            return load_images(
                find_source(data, root=root, split=part, trained_on=trained_on),
                preprocess=bundle.preprocess,
                class_names=bundle.class_names,
                progress=process.is_main,
            )

        images = load(split)
        if calibrate:
            bundle = _calibrate(bundle, load("validation"), predictor, process)
        with _progress("evaluating", len(images), shown=process.is_main) as advance:
            logits = predictor.predict(images.read, count=len(images), on_progress=advance)
        damaged = _measure_corruptions(predictor, images, shown=process.is_main) if corruptions else None
        sweeps = _measure_sweeps(predictor, images, shift=shift, rotate=rotate, shown=process.is_main)
        if not process.is_main:
            return
        evaluation, scores = summarize(
            logits,
            images,
            bundle,
            num_examples=pictures,
            corruptions=damaged,
            sweeps=sweeps,
            cost=_measure_cost(predictor, images),
            conditions=_describe_conditions(predictor, process),
        )
    _write(evaluation, scores, images, bundle, output, overwrite=overwrite)
    _show(evaluation, output)


@contextmanager
def _progress(title: str, total: int, *, shown: bool) -> "Iterator[Callable[[int], object]]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def _calibrate(
    bundle: "Bundle", validation: "Images", predictor: "Predictor", process: "Process"
) -> "Bundle":
    """Fit the temperature on the validation images, keep it in the model file, load that again."""
    from vit.bundle import MODEL_FILE, load_bundle, update_metadata
    from vit.evaluation.calibration import fit_temperature

    with _progress("calibrating", len(validation), shown=process.is_main) as advance:
        logits = predictor.predict(validation.read, count=len(validation), on_progress=advance)
    if process.is_main:
        path = Path(bundle.name)
        update_metadata(
            path / MODEL_FILE if path.is_dir() else path,
            temperature=fit_temperature(logits, validation.labels),
            temperature_fitted_on={
                "split": validation.dataset.split,
                "num_images": len(validation),
                "fingerprint": validation.dataset.fingerprint,
            },
        )
    process.wait()
    return load_bundle(bundle.name, device=predictor.device)


def _measure_corruptions(predictor: "Predictor", images: "Images", *, shown: bool) -> dict[str, list[float]]:
    from vit.evaluation.corruptions import CORRUPTIONS, SEVERITIES
    from vit.evaluation.robustness import measure_corruptions

    total = len(images) * len(CORRUPTIONS) * len(SEVERITIES)
    with _progress("corrupting", total, shown=shown) as advance:
        return measure_corruptions(predictor, images, on_progress=advance)


def _measure_sweeps(
    predictor: "Predictor", images: "Images", *, shift: bool, rotate: bool, shown: bool
) -> "dict[str, Sweep]":
    from vit.evaluation.corruptions import ROTATIONS, SHIFTS
    from vit.evaluation.robustness import measure_rotations, measure_shifts

    sweeps: dict[str, Sweep] = {}
    if shift:
        with _progress("shifting", len(images) * 2 * len(SHIFTS), shown=shown) as advance:
            sweeps |= measure_shifts(predictor, images, on_progress=advance)
    if rotate:
        with _progress("rotating", len(images) * len(ROTATIONS), shown=shown) as advance:
            sweeps |= measure_rotations(predictor, images, on_progress=advance)
    return sweeps


def _measure_cost(predictor: "Predictor", images: "Images") -> "Cost":
    import torch

    from vit.evaluation.cost import measure_cost

    pixels = torch.from_numpy(images.read(0, predictor.batch_size).copy()).to(predictor.device)
    batch = predictor.preprocess.normalize(pixels)
    return measure_cost(predictor.model, batch, precision=predictor.precision)


def _describe_conditions(predictor: "Predictor", process: "Process") -> dict[str, str]:
    import datetime
    import shlex
    import sys

    from vit.bundle import collect_versions
    from vit.runtime.device import describe_device

    return {
        "device": describe_device(predictor.device),
        "processes": str(process.world_size),
        "precision": predictor.precision,
        "batch size": str(predictor.batch_size),
        "test-time augmentation": "mirrored" if predictor.mirrored else "none",
        "command": shlex.join(["vit", *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **collect_versions(),
    }


def _write(
    evaluation: "Evaluation",
    scores: "Scores",
    images: "Images",
    bundle: "Bundle",
    output: Path,
    *,
    overwrite: bool,
) -> None:
    from vit.evaluation.metrics import compute_confusion
    from vit.evaluation.plots import draw_confusion
    from vit.evaluation.result import EVALUATION_FILE, PREDICTIONS_FILE, save_evaluation, save_predictions
    from vit.pages.report import build_report, draw_maps, load_history, render_markdown
    from vit.runtime.files import write_text
    from vit.runtime.output_dir import prepare_output

    report = build_report(
        evaluation,
        scores=scores,
        images=images,
        history=load_history(bundle.name),
        explain=lambda pictures: draw_maps(bundle, pictures),
    )
    prepare_output(output, overwrite=overwrite)
    save_predictions(output / PREDICTIONS_FILE, scores, ids=images.ids, class_names=bundle.class_names)
    draw_confusion(compute_confusion(scores), class_names=bundle.class_names, path=output / "confusion.png")
    write_text(output / "evaluation.md", render_markdown(evaluation))
    write_text(output / "report.html", report)
    save_evaluation(output / EVALUATION_FILE, evaluation)


def _show(evaluation: "Evaluation", output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})")
    table.add_column("figure")
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
