"""`vit evaluate`: metrics of a model on a split, with their intervals."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vit.evaluate.record import Evaluation


def evaluate(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    output: Annotated[Path, typer.Option(help="directory for the figures, predictions and the report")],
    data: Annotated[
        str | None,
        typer.Option(help="a data set, folder, label file (.csv) or shards; default: what it was trained on"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="train, validation, test or all; default: test, or all of a plain folder"),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    overwrite: Annotated[bool, typer.Option(help="replace an earlier evaluation in --output")] = False,
) -> None:
    """Measure a model on images it has not seen, and say how sure the figures are."""
    from rich.progress import Progress

    from vit.bundle import collect_versions, load_bundle
    from vit.cli.common import prepare_output
    from vit.data.stores import build_store
    from vit.device import choose_device, choose_precision, describe_device
    from vit.evaluate.intervals import compute_intervals
    from vit.evaluate.metrics import (
        compute_confusion,
        compute_figures,
        compute_per_class,
        compute_reliability,
        score_logits,
    )
    from vit.evaluate.plots import draw_confusion
    from vit.evaluate.predict import predict_logits
    from vit.evaluate.record import (
        EVALUATION_FILE,
        PREDICTIONS_FILE,
        Evaluation,
        save_evaluation,
        save_predictions,
    )
    from vit.evaluate.sources import find_source, map_labels

    prepare_output(output, overwrite=overwrite)
    chosen = choose_device(device)
    used_precision = choose_precision(precision, chosen)
    bundle = load_bundle(model, device=chosen)
    source = find_source(data, split=split, trained_on=bundle.config.get("data", {}))
    store = build_store(
        source, size=bundle.preprocess.resize_size, interpolation=bundle.preprocess.interpolation
    )
    images = store.images
    assert images is not None  # a store with a size holds pixels
    labels = map_labels(store.labels, source_classes=source.class_names, model_classes=bundle.class_names)
    with Progress(transient=True) as progress:
        task = progress.add_task("evaluating", total=len(labels))
        logits = predict_logits(
            bundle.model,
            lambda start, stop: bundle.preprocess.crop(images[start:stop]),
            count=len(labels),
            preprocess=bundle.preprocess,
            num_classes=len(bundle.class_names),
            batch_size=batch_size,
            device=chosen,
            precision=used_precision,
            on_progress=lambda done: progress.advance(task, done),
        )
    scores = score_logits(logits, labels, temperature=bundle.temperature)
    confusion = compute_confusion(scores)
    evaluation = Evaluation.model_validate(
        {
            **compute_figures(scores),
            "intervals": compute_intervals(scores),
            "per_class": compute_per_class(confusion, bundle.class_names),
            "reliability": compute_reliability(scores),
            "num_images": len(scores),
            "unreadable": store.unreadable,
            "data": store.name,
            "split": store.split,
            "fingerprint": store.fingerprint,
            "model": model,
            "model_sha256": bundle.sha256,
            "conditions": {
                "device": describe_device(chosen),
                "precision": used_precision,
                "batch_size": str(batch_size),
                **collect_versions(),
            },
        }
    )
    save_evaluation(output / EVALUATION_FILE, evaluation)
    save_predictions(output / PREDICTIONS_FILE, scores, ids=store.ids, class_names=bundle.class_names)
    draw_confusion(confusion, class_names=bundle.class_names, path=output / "confusion.png")
    _show(evaluation, output)


def _show(evaluation: "Evaluation", output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    for name, (low, high) in evaluation.intervals.items():
        table.add_row(name, f"{getattr(evaluation, name):.4f}", f"{low:.4f} … {high:.4f}")
    console = Console()
    console.print(table)
    if evaluation.unreadable:
        console.print(f"{len(evaluation.unreadable)} images could not be read and are not counted:")
        for name, reason in evaluation.unreadable[:5]:
            console.print(f"  {name}: {reason}", markup=False, highlight=False)
    console.print(f"written to {output}")
