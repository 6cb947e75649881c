"""`vit attention`: attention maps of any images, or of images of the model's own test split."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from vit.cli.common import Device, Model, Output, Overwrite, Precision, RandomWeights

if TYPE_CHECKING:
    from pathlib import Path

Method = Annotated[
    str,
    typer.Option(
        help="one or more, separated by commas: rollout, raw, gae, gae-scale-free, "
        "gradient-rollout, attn-gradcam, legrad, cdam, input-x-gradient"
    ),
]
Target = Annotated[str, typer.Option("--class", help="auto (the predicted one), a name, an index, all or top3")]
Formats = Annotated[str, typer.Option("--format", help="png, npz, html, tensorboard; separated by commas")]
Checks = Annotated[
    bool | None, typer.Option("--checks/--no-checks", help="sanity checks of every map; default: up to 64 images")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="images at a time; default 64 up to 64 pixels a side, else 16")
]
DiscardRatio = Annotated[float, typer.Option(help="rollout: fraction of the weakest attention dropped")]
Images = Annotated[list[str] | None, typer.Argument(help="files or folders; without, images of the model's test split")]


def attention(
    model: Model,
    images: Images = None,
    *,
    output: Output,
    method: Method = "rollout",
    target: Target = "auto",
    formats: Formats = "png,npz",
    scale: Annotated[str, typer.Option(help="of the colours: image, batch or fixed")] = "image",
    checks: Checks = None,
    trust: Annotated[bool | None, typer.Option("--trust/--no-trust", hidden=True)] = None,  # an older name
    head_fusion: Annotated[str, typer.Option(help="rollout: mean, max or min")] = "mean",
    discard_ratio: DiscardRatio = 0.0,
    residual: Annotated[float, typer.Option(help="rollout: weight of the residual connection")] = 0.5,
    start_layer: Annotated[int, typer.Option(help="leave out the layers before this one")] = 0,
    layer: Annotated[str, typer.Option(help="raw: a layer, or all as one picture; -1 is the last")] = "-1",
    head: Annotated[str, typer.Option(help="raw: a head, mean, or all as one picture")] = "mean",
    count: Annotated[int, typer.Option("--images", min=1, help="how many, where no IMAGES are named")] = 16,
    batch_size: BatchSize = None,
    device: Device = "auto",
    precision: Precision = "float32",
    random_weights: RandomWeights = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue: skip what the manifest holds")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Show which parts of an image the model's answer came from, with sanity checks of each map.

    Writes NAME.METHOD.png, maps.npz (exact values on the patch grid), manifest.json and, with --format html,
    a gallery to open in a browser.
    """
    from vit import api
    from vit.data.inputs import list_images
    from vit.explanation.methods.table import MapOptions

    api.explain(
        model,
        sorted({str(path) for path in list_images(images)}) if images else None,
        methods=_split(method),
        target=target,
        options=MapOptions(
            head_fusion=head_fusion,
            discard_ratio=discard_ratio,
            residual=residual,
            start_layer=start_layer,
            layer=_read_index(layer, option="--layer", words={"all": None}),
            head=_read_index(head, option="--head", words={"all": None, "mean": -1}),
        ),
        scale=scale,
        sanity_checks=trust if checks is None else checks,
        count=count,
        batch_size=batch_size,
        device=device,
        precision=precision,
        random_weights=random_weights,
        output=output,
        formats=_split(formats),
        resume=resume,
        overwrite=overwrite,
    )
    _show(output, formats=_split(formats))


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _read_index(text: str, *, option: str, words: dict[str, int | None]) -> int | None:
    if text in words:
        return words[text]
    if not text.removeprefix("-").isdigit():
        raise ValueError(f"{option} {text!r} is not a number or {' or '.join(words)}")
    return int(text)


def _show(output: "Path", *, formats: tuple[str, ...]) -> None:
    """What the manifest says: images, those left out, and maps that failed a sanity check."""
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    unreadable = manifest["unreadable"]
    for image in unreadable:
        typer.secho(f"skipped {image['path']}: {image['reason']}", fg="yellow")
    skipped = f", {len(unreadable)} skipped" if unreadable else ""
    typer.echo(f"{len(manifest['images'])} images explained{skipped}: {output}")
    checks = [found["sanity_check"] for image in manifest["images"] for found in image["maps"]]
    checks = [check for check in checks if check]
    if failed := sum(bool(check["warnings"]) for check in checks):
        typer.echo(f"{failed} of {len(checks)} maps failed a sanity check; each says which")
    if "html" in formats:
        typer.echo(f"open {output / 'gallery.html'} in a browser")
