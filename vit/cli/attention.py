"""`vit attention`: attention maps over any images, or over images of the model's own test split."""

from pathlib import Path
from typing import Annotated

import typer


def attention(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    images: Annotated[
        list[str] | None, typer.Argument(help="files or folders; without, images of the model's test split")
    ] = None,
    output: Annotated[Path, typer.Option(help="directory to write")] = Path("attention"),
    method: Annotated[str, typer.Option(help="one or more methods, separated by commas")] = "rollout",
    count: Annotated[int, typer.Option("--images", min=1, help="how many, where no IMAGES are given")] = 16,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps")] = "auto",
    random_weights: Annotated[bool, typer.Option(help="the same model untrained: a sanity control")] = False,
    overwrite: Annotated[bool, typer.Option(help="replace what --output holds")] = False,
) -> None:
    """Show where the model looked: overlays, exact arrays and a manifest."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from vit.bundle import load_bundle
    from vit.cli.common import prepare_output
    from vit.device import choose_device
    from vit.evaluate.files import find_images
    from vit.explain.export import export_maps, items_from_files, items_from_source
    from vit.explain.methods import find_methods

    methods = [name.strip() for name in method.split(",")]
    find_methods(methods)
    bundle = load_bundle(model, device=choose_device(device), random_weights=random_weights)
    if images:
        items = items_from_files(list(find_images(images, listed=())))
    else:
        items = items_from_source(_find_test_split(bundle.config), count=count)
    prepare_output(output, overwrite=overwrite)
    console = Console()
    with Progress(
        *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn()
    ) as progress:
        task = progress.add_task("attention", total=len(items))
        summary = export_maps(
            bundle,
            items,
            output,
            methods=methods,
            batch_size=batch_size,
            on_progress=lambda done: progress.advance(task, done),
        )
    for bad in summary.unreadable:
        console.print(f"skipped {bad['path']}: {bad['reason']}", style="yellow", markup=False)
    if summary.explained == 0:
        raise ValueError(f"none of the {len(items)} images could be read")
    skipped = f", {len(summary.unreadable)} skipped" if summary.unreadable else ""
    console.print(f"{summary.explained} images explained{skipped}: {output}", markup=False, highlight=False)


def _find_test_split(config: dict[str, object]):  # type: ignore[no-untyped-def]
    from vit.data.sources import load_source

    data = config.get("data")
    if not isinstance(data, dict) or "name" not in data:
        raise ValueError(
            "the model does not say which data it was trained on; name image files or folders to explain"
        )
    known = {
        key: data[key] for key in ("root", "classes", "validation_fraction", "split_seed") if key in data
    }
    return load_source(data["name"], split="test", **known)
