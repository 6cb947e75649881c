"""`vit attention`: attention maps over any images, or over images of the model's own test split."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from vit.bundle import Bundle
    from vit.explanation.items import ImageItem
    from vit.explanation.render.explained import ExplainedImage
    from vit.explanation.render.write import MapWriter

FORMATS = ("png", "npz", "html", "tensorboard")
_CHECKED_UP_TO = 64  # images: the checks cost about 25 forward passes an image


def attention(
    model: Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")],
    output: Annotated[Path, typer.Option(help="directory for the pictures, the arrays and the manifest")],
    images: Annotated[
        list[str] | None, typer.Argument(help="files or folders; without, images of the model's test split")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="one or more, separated by commas: rollout, raw, gae, gae-scale-free, "
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
    checks: Annotated[
        bool | None, typer.Option(help=f"sanity checks of every map; default: up to {_CHECKED_UP_TO} images")
    ] = None,
    trust: Annotated[bool | None, typer.Option(hidden=True)] = None,  # the older name of --checks
    head_fusion: Annotated[str, typer.Option(help="rollout: mean, max or min")] = "mean",
    discard_ratio: Annotated[
        float, typer.Option(help="rollout: share of the weakest attention dropped")
    ] = 0.0,
    residual: Annotated[float, typer.Option(help="rollout: share of a token that stays itself")] = 0.5,
    start_layer: Annotated[int, typer.Option(help="leave out the layers before this one")] = 0,
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
    from vit.explanation.explain import check_settings, choose_batch_size
    from vit.explanation.methods.table import MapOptions
    from vit.explanation.render.explained import Settings
    from vit.explanation.render.write import MapWriter
    from vit.runtime.device import choose_device, choose_precision
    from vit.runtime.memory import keep_freed_memory
    from vit.runtime.output_dir import prepare_output

    checks = trust if checks is None else checks
    wanted = _split(formats, known=FORMATS)
    chosen_device = choose_device(device)
    keep_freed_memory()
    bundle = load_bundle(model, device=chosen_device, random_weights=random_weights)
    paths = _find_files(images) if images else None
    number = len(paths) if paths is not None else count
    settings = Settings(
        methods=tuple(name.strip() for name in method.split(",")),
        options=MapOptions(
            head_fusion=head_fusion,
            discard_ratio=discard_ratio,
            residual=residual,
            start_layer=start_layer,
            layer=_index(layer, name="--layer", words={"all": None}),
            head=_index(head, name="--head", words={"all": None, "mean": -1}),
        ),
        target=classes,
        scale=scale,
        sanity_checks=number <= _CHECKED_UP_TO if checks is None else checks,
        batch_size=batch_size or choose_batch_size(bundle.preprocess.image_size),
        precision=choose_precision(precision, chosen_device),
    )
    # mistakes are said before anything is written
    check_settings(bundle, settings)
    writer = MapWriter(output, bundle, settings, formats=wanted, resume=resume)
    items = _find_items(bundle, paths, count=count, writer=writer)
    if not resume:
        prepare_output(output, overwrite=overwrite)
    _export(items, writer, wanted)
    console = Console(highlight=False)
    for bad in writer.unreadable:
        console.print(f"skipped {bad['path']}: {bad['reason']}", style="yellow", markup=False, soft_wrap=True)
    if not writer.entries:
        raise ValueError(f"none of the {len(items)} images could be read")
    _print_summary(console, writer, wanted)


def _export(items: "list[ImageItem]", writer: "MapWriter", wanted: tuple[str, ...]) -> None:
    from vit.explanation.explain import iterate_explanations
    from vit.pages.gallery import Gallery
    from vit.runtime.progress import show_progress

    bundle = writer.bundle
    gallery = Gallery(bundle.class_names) if "html" in wanted else None
    observers: list[Callable[[list[ExplainedImage]], None]] = [writer.add]
    if gallery:
        observers.append(gallery.add)
    with writer, show_progress("attention", len(items)) as advance:
        if "tensorboard" in wanted:
            observers.append(_write_tensorboard(writer.output / "tensorboard", bundle.class_names))
        for explained in iterate_explanations(
            bundle,
            items,
            writer.settings,
            on_unreadable=writer.add_unreadable,
            patch_attention_bytes=gallery.patch_attention_bytes if gallery else 0,
        ):
            for observe in observers:
                observe(explained)
            advance(len(explained))
    if gallery:
        gallery.write(writer.output / "gallery.html", title=f"Attention maps of {bundle.name}")


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
    bundle: "Bundle", paths: list[str] | None, *, count: int, writer: "MapWriter"
) -> "list[ImageItem]":
    """What is left to explain."""
    from vit.data.open import open_for_model
    from vit.explanation.items import items_from_files, items_from_source

    if paths is not None:
        return items_from_files([path for path in paths if path not in writer.paths], taken=writer.names)
    source = open_for_model(None, trained_on=bundle.config.get("data", {})).split("test")
    return [item for item in items_from_source(source, count=count) if item.path not in writer.paths]


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


def _print_summary(console: "Console", writer: "MapWriter", wanted: tuple[str, ...]) -> None:
    maps = [found for entry in writer.entries for found in entry["maps"]]
    checks = [found["sanity_check"] for found in maps if found["sanity_check"]]
    failed = sum(bool(check["warnings"]) for check in checks)
    skipped = f", {len(writer.unreadable)} skipped" if writer.unreadable else ""
    console.print(f"{len(writer.entries)} images explained{skipped}: {writer.output}", markup=False)
    if failed:
        console.print(f"{failed} of {len(checks)} maps failed a sanity check; each says which", markup=False)
    if "html" in wanted:
        console.print(f"open {writer.output / 'gallery.html'} in a browser", markup=False)
