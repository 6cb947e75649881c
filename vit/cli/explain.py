"""`vit explain`, also called `vit attention`: maps of any images, or of the model's test split."""

import json
from functools import partial
from pathlib import Path

import typer

from vit.cli.common import list_names
from vit.options import ExplainOptions


def explain(
    model: str,
    images: list[str] | None = None,
    *,
    output: Path,
    summary: bool = False,
    masks: Path | None = None,
    options: ExplainOptions,
) -> None:
    """Show which parts of an image the model's answer came from, with sanity checks of each map.

    Writes index.png, to look at first (photos and maps side by side, the first 24), NAME.METHOD.png,
    maps.npz (exact values on the patch grid), manifest.json and, with --format html, a gallery to
    open in a browser. vit attention is the same command.

    Methods: rollout, raw, gae, gradient-rollout, attn-gradcam, legrad, cdam, input-x-gradient,
    libra-fullgrad, libra-gae, libra-input-x-gradient, removal-gradient, libra-removal. Of models
    without attention (ResNet, ConvNeXt, Swin): grad-cam, input-x-gradient.

    With --summary, over up to 200 images of each class: where and on which kinds of patches the
    class is recognised, what leaving those out changes, and likely shortcuts such as a watermark
    (summary.html, summary.json). Folders named as classes are taken as labels.

    Args:
        model: model.safetensors, a training directory, timm:NAME or imagenette
        images: files, folders, or - for a list on standard input; without, images of the model's
            test split
        output: directory for the results
        summary: summarise what each class is recognised by, and look for shortcuts
        masks: of --summary: a folder of masks, images of the same names, black but for the object,
            or a COCO file
    """
    # torch, which `vit --help` does without
    from vit import api
    from vit.analysis.class_summary.command import write_summary
    from vit.data.listing import list_images
    from vit.explanation.best_method import describe_best_method

    paths = None
    if images:
        paths = sorted({str(path) for path in list_images(list_names(images))})
    if summary:
        if len(options.methods) != 1:
            raise ValueError(f"--summary takes one --method, not {', '.join(options.methods)}")
        summarize = partial(
            api.summarize_classes,
            model,
            paths,
            method=options.methods[0],
            masks=masks,
            batch_size=options.batch_size,
            device=options.device,
        )
        write_summary(summarize, output=output, overwrite=options.overwrite)
        return
    if masks is not None:
        raise ValueError("--masks is an option of --summary; add that")
    result = api.explain(model, paths, output=output, **vars(options))

    _show(output, has_gallery="html" in options.formats)
    best = describe_best_method(result.bundle)
    if best and not options.random_weights:
        typer.echo(best)


def _show(output: Path, *, has_gallery: bool) -> None:
    # torch, which `vit --help` does without
    from vit.explanation.checks.sanity_checks import count_agreeing
    from vit.explanation.methods.sinks import count_sinks
    from vit.explanation.writer import SHEET_FILE

    # the manifest also holds what an earlier command explained
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    verdicts: dict[str, list[str]] = {}
    sink_fractions: dict[str, list[float]] = {}
    for entry in (entry for image in manifest["images"] for entry in image["maps"]):
        if entry["sanity_check"]:
            verdicts.setdefault(entry["method"], []).append(entry["sanity_check"]["verdict"])
        sink_fractions.setdefault(entry["method"], []).append(entry["sink_fraction"])
    for line in count_agreeing(verdicts) + count_sinks(sink_fractions):
        typer.echo(line)

    unreadable = manifest["unreadable"]
    for image in unreadable:
        typer.secho(f"skipped {image['path']}: {image['reason']}", fg="yellow")
    skipped = f", {len(unreadable)} skipped" if unreadable else ""
    typer.echo(f"{len(manifest['images'])} images explained{skipped}: {output}")

    if (output / SHEET_FILE).is_file():
        typer.echo(f"open {output / SHEET_FILE} first: photos and maps side by side")
    if has_gallery:
        typer.echo(f"open {output / 'gallery.html'} in a browser")
