"""`vit attention`: attention maps over any images, or over images of the model's own test split."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from vit.bundle import Bundle
    from vit.explanation.explain import ExplainedImage, Settings
    from vit.explanation.items import ImageItem
    from vit.explanation.render.write import Results

FORMATS = ("png", "npz", "html", "tensorboard")
_TRUST_UP_TO = 64  # images: a report costs about 25 forward passes an image


def attention(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    output: Annotated[Path, typer.Option(help="directory for the pictures, the arrays and the manifest")],
    images: Annotated[
        list[str] | None, typer.Argument(help="files or folders; without, images of the model's test split")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="one or more, separated by commas: rollout, chunked, raw, gae, gae-scale-free, "
            "gradient-rollout, attn-gradcam, legrad, cdam, input-x-gradient"
        ),
    ] = "rollout",
    classes: Annotated[
        str, typer.Option("--class", help="auto (the predicted one), a name, an index, all or top3")
    ] = "auto",
    formats: Annotated[
        str, typer.Option("--format", help="png, npz, html, tensorboard; separated by commas")
    ] = "png,npz",
    scale: Annotated[str, typer.Option(help="of the colours: image, batch or fixed")] = "image",
    trust: Annotated[
        bool | None,
        typer.Option(
            "--trust/--no-trust", help=f"report with every map; default: up to {_TRUST_UP_TO} images"
        ),
    ] = None,
    head_fusion: Annotated[str, typer.Option(help="rollout: mean, max or min")] = "mean",
    discard_ratio: Annotated[
        float, typer.Option(help="rollout: share of the weakest attention dropped")
    ] = 0.0,
    residual: Annotated[float, typer.Option(help="rollout: share of a token that stays itself")] = 0.5,
    start_layer: Annotated[int, typer.Option(help="leave out the layers before this one")] = 0,
    compat: Annotated[
        str | None, typer.Option(help="vit-explain: that program's numbers, bugs included, to compare")
    ] = None,
    layer: Annotated[str, typer.Option(help="raw: a layer, or all for a sheet; -1 is the last")] = "-1",
    head: Annotated[str, typer.Option(help="raw: a head, mean, or all for a sheet")] = "mean",
    count: Annotated[int, typer.Option("--images", min=1, help="how many, where no IMAGES are named")] = 16,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="images at a time; default 64 up to 64 pixels a side, else 16")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or auto")] = "float32",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="the same model untrained: a sanity control")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue: skip what the manifest holds")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier export")] = False,
) -> None:
    """Show where a model looked, and how far each picture may be believed.

    Writes NAME.METHOD.png, maps.npz (exact values on the patch grid), manifest.json and, with --format html,
    a gallery to open in a browser.
    """
    from rich.console import Console

    from vit.bundle import load_bundle
    from vit.explanation.capture.capture import find_attention_layers
    from vit.explanation.explain import Settings, choose_batch_size
    from vit.explanation.methods.table import MapOptions, check_options
    from vit.explanation.methods.targets import build_target_chooser
    from vit.explanation.render.write import Results, load_results
    from vit.runtime.device import choose_device, choose_precision
    from vit.runtime.memory import keep_freed_memory
    from vit.runtime.output_dir import prepare_output

    wanted = _split(formats, known=FORMATS)
    chosen_device = choose_device(device)
    keep_freed_memory()
    bundle = load_bundle(model, device=chosen_device, random_weights=random_weights)
    paths = _find_files(images) if images else None
    number = len(paths) if paths is not None else count
    settings = Settings(
        methods=tuple(name.strip() for name in method.split(",")),
        maps=MapOptions(
            head_fusion=head_fusion,
            discard_ratio=discard_ratio,
            residual=residual,
            start_layer=start_layer,
            compat=compat,
            layer=_index(layer, name="--layer", words={"all": None}),
            head=_index(head, name="--head", words={"all": None, "mean": -1}),
        ),
        classes=classes,
        scale=scale,
        trust=number <= _TRUST_UP_TO if trust is None else trust,
        batch_size=batch_size or choose_batch_size(bundle.preprocess.image_size),
        precision=choose_precision(precision, chosen_device),
    )
    # mistakes are said before anything is written
    build_target_chooser(classes, bundle.class_names)
    check_options(settings.maps, find_attention_layers(bundle.model))
    done = load_results(output, bundle, settings) if resume else Results()
    items = _find_items(bundle, paths, count=count, done=done)
    if not resume:
        prepare_output(output, overwrite=overwrite)
    output.mkdir(parents=True, exist_ok=True)
    results = _export(bundle, items, output, settings, wanted, done)
    console = Console(highlight=False)
    for bad in results.unreadable:
        console.print(f"skipped {bad['path']}: {bad['reason']}", style="yellow", markup=False, soft_wrap=True)
    if not results.entries:
        raise ValueError(f"none of the {len(items)} images could be read")
    _print_summary(console, results, output, wanted)


def _export(
    bundle: "Bundle",
    items: "list[ImageItem]",
    output: Path,
    settings: "Settings",
    wanted: tuple[str, ...],
    done: "Results",
) -> "Results":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from vit.explanation.render.write import export_maps
    from vit.pages.gallery import Gallery

    gallery = Gallery(bundle.class_names) if "html" in wanted else None
    observers: list[Callable[[list[ExplainedImage]], None]] = [gallery.add] if gallery else []
    if "tensorboard" in wanted:
        observers.append(_write_tensorboard(output / "tensorboard", bundle.class_names))
    columns = (TextColumn("attention"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("attention", total=len(items))
        results = export_maps(
            bundle,
            items,
            output,
            settings,
            pictures="png" in wanted,
            arrays="npz" in wanted,
            done=done,
            row_budget=gallery.row_budget if gallery else 0,
            on_batch=lambda explained: [observe(explained) for observe in observers],
            on_progress=lambda number: progress.advance(task, number),
        )
    if gallery:
        gallery.write(output / "gallery.html", title=f"Attention maps of {bundle.name}")
    return results


def _write_tensorboard(
    directory: Path, class_names: "tuple[str, ...]"
) -> "Callable[[list[ExplainedImage]], None]":
    from torch.utils.tensorboard import SummaryWriter

    from vit.explanation.render.write import draw_map

    writer = SummaryWriter(directory)

    def write(explained: "list[ExplainedImage]") -> None:
        import numpy as np

        for of_image in explained:
            for found in of_image.maps:
                picture = np.asarray(draw_map(of_image, found, class_names))
                writer.add_image(f"attention/{found.key}", picture, dataformats="HWC")
        writer.flush()

    return write


def _find_files(names: list[str]) -> list[str]:
    from vit.data.inputs import find_image_files

    return [path for name in names for path in find_image_files(name)]


def _find_items(
    bundle: "Bundle", paths: list[str] | None, *, count: int, done: "Results"
) -> "list[ImageItem]":
    """What is left to explain."""
    from vit.evaluation.images import find_source
    from vit.explanation.items import items_from_files, items_from_source

    if paths is not None:
        return items_from_files([path for path in paths if path not in done.paths], taken=done.names)
    source = find_source(None, root=None, split="test", trained_on=bundle.config.get("data", {}))
    return [item for item in items_from_source(source, count=count) if item.path not in done.paths]


def _split(text: str, *, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown --format {name!r}; known: {', '.join(known)}")
    return names


def _index(text: str, *, name: str, words: dict[str, int | None]) -> int | None:
    if text in words:
        return words[text]
    if not text.removeprefix("-").isdigit():
        raise ValueError(f"{name} {text!r} is not a number or {' or '.join(words)}")
    return int(text)


def _print_summary(console: "Console", results: "Results", output: Path, wanted: tuple[str, ...]) -> None:
    reports = [found["trust"] for entry in results.entries for found in entry["maps"] if found["trust"]]
    doubtful = sum(bool(report["warnings"]) for report in reports)
    skipped = f", {len(results.unreadable)} skipped" if results.unreadable else ""
    console.print(f"{len(results.entries)} images explained{skipped}: {output}", markup=False)
    if doubtful:
        console.print(
            f"{doubtful} of {len(reports)} maps failed a check of trust; they say which", markup=False
        )
    if "html" in wanted:
        console.print(f"open {output / 'gallery.html'} in a browser", markup=False)
