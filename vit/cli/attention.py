"""`vit attention`: attention maps of any images, or of images of the model's own test split."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from vit.cli.common import Batch, Device, Model, Output, Overwrite, Precision, RandomWeights, list_names

_METHOD = "one or more of the methods, separated by commas; best: the one that vit faithfulness found"
_CLASS = "auto (the predicted one), a name, an index, all or top3"
_CHECKS = "sanity checks of every map; default: up to 64 images"
Images = Annotated[
    list[str] | None,
    typer.Argument(help="files, folders, or - for a list on standard input; without, images of the model's test split"),
]


def attention(
    model: Model,
    images: Images = None,
    *,
    output: Output,
    method: Annotated[str, typer.Option(help=_METHOD)] = "rollout",
    target: Annotated[str, typer.Option("--class", help=_CLASS)] = "auto",
    formats: Annotated[
        str, typer.Option("--format", help="png (or jpeg or webp), npz, html, tensorboard; separated by commas")
    ] = "png,npz",
    max_side: Annotated[int, typer.Option(min=0, help="of a photo in the overlays, pixels; 0: no limit")] = 512,
    scale: Annotated[str, typer.Option(help="of the colours: image, batch or fixed")] = "image",
    checks: Annotated[bool | None, typer.Option("--checks/--no-checks", help=_CHECKS)] = None,
    trust: Annotated[bool | None, typer.Option("--trust/--no-trust", hidden=True)] = None,  # an older name
    head_fusion: Annotated[str, typer.Option(help="rollout: mean, max or min")] = "mean",
    discard_ratio: Annotated[float, typer.Option(help="rollout: fraction of the weakest attention dropped")] = 0.0,
    residual: Annotated[float, typer.Option(help="rollout: weight of the residual connection")] = 0.5,
    start_layer: Annotated[int, typer.Option(help="leave out the layers before this one")] = 0,
    layer: Annotated[str, typer.Option(help="raw: a layer, or all as one picture; -1 is the last")] = "-1",
    head: Annotated[str, typer.Option(help="raw: a head, mean, or all as one picture")] = "mean",
    passes: Annotated[
        int, typer.Option(min=1, help="removal-gradient: above 1, mean over so many random halves of the patches")
    ] = 1,
    count: Annotated[int, typer.Option("--images", min=1, help="how many, where no IMAGES are named")] = 16,
    batch_size: Batch = None,
    device: Device = "auto",
    precision: Precision = "float32",
    random_weights: RandomWeights = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue: skip what the manifest holds")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Show which parts of an image the model's answer came from, with sanity checks of each map.

    Writes NAME.METHOD.png, maps.npz (exact values on the patch grid), manifest.json and, with --format html,
    a gallery to open in a browser.

    Methods: rollout, raw, gae, gae-scale-free, gradient-rollout, attn-gradcam, legrad, cdam, input-x-gradient,
    libra-fullgrad, libra-gae, libra-input-x-gradient, removal-gradient, removal-gradient-logit, libra-removal.
    """
    from vit import api
    from vit.data.inputs import list_images
    from vit.explanation.faithfulness.best_method import describe_best_method
    from vit.explanation.methods.table import MapOptions

    paths = sorted({str(path) for path in list_images(list_names(images))}) if images else None
    methods, wanted = ([name.strip() for name in text.split(",")] for text in (method, formats))
    of_rollout: dict[str, Any] = {"head_fusion": head_fusion, "discard_ratio": discard_ratio, "residual": residual}
    layer_index = _read_index(layer, option="--layer", words={"all": None})
    head_index = _read_index(head, option="--head", words={"all": None, "mean": -1})
    options = MapOptions(**of_rollout, start_layer=start_layer, layer=layer_index, head=head_index, passes=passes)
    maps: dict[str, Any] = {"methods": methods, "target": target, "options": options, "scale": scale, "count": count}
    running: dict[str, Any] = {"device": device, "precision": precision, "random_weights": random_weights}
    export: dict[str, Any] = {"output": output, "formats": wanted, "resume": resume, "overwrite": overwrite}
    export["max_side"] = max_side
    checks = trust if checks is None else checks
    found = api.explain(model, paths, **maps, **running, **export, sanity_checks=checks, batch_size=batch_size)
    _show(output, formats=wanted)
    if best := "" if random_weights else describe_best_method(found.bundle):
        typer.echo(best)


def _read_index(text: str, *, option: str, words: dict[str, int | None]) -> int | None:
    if text in words:
        return words[text]
    if not text.removeprefix("-").isdigit():
        raise ValueError(f"{option} {text!r} is not a number or {' or '.join(words)}")
    return int(text)


def _show(output: Path, *, formats: list[str]) -> None:
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    for image in (unreadable := manifest["unreadable"]):
        typer.secho(f"skipped {image['path']}: {image['reason']}", fg="yellow")
    skipped = f", {len(unreadable)} skipped" if unreadable else ""
    typer.echo(f"{len(manifest['images'])} images explained{skipped}: {output}")
    maps = [found for image in manifest["images"] for found in image["maps"]]
    checks = [found["sanity_check"] for found in maps if found["sanity_check"]]
    if verdicts := Counter(check["verdict"] for check in checks):
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        typer.echo(f"sanity checks of {len(checks)} maps: {counts}")
    if "html" in formats:
        typer.echo(f"open {output / 'gallery.html'} in a browser")
