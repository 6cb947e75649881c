"""`vit explain`, also called `vit attention`."""

import json
from pathlib import Path
from typing import Literal

from vit.cli.predict import check_images, import_engine, list_names
from vit.runtime.command import Call, Command
from vit.runtime.console import echo
from vit.runtime.files import expand_home


def explain(
    find: Call,
    images: list[str] | None = None,
    *,
    output: str,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
) -> None:
    """Show which parts of an image explain the prediction.

    Writes index.png (look at it first: up to 24 photos), NAME.METHOD.png, maps.npz (exact values),
    manifest.json and, with --format html, a gallery.

    Args:
        images: Files, folders, or - for a list on standard input. None: the model's test split.
        output: Directory for the results; of --engine ray also an address.
        engine: local, or ray: a cluster, with a row of a Parquet file for each image.
        workers: Workers of --engine ray. None: one for each GPU, or for 4 cores.
    """
    # torch takes seconds to import, and `vit --help` does without
    from vit.data.images import list_images

    if engine == "ray":
        places = list_names(images or ())
        import_engine().explain_on_ray(places, find.keywords, output=output, workers=workers)
        return
    paths = None
    if images:
        check_images(images)
        paths = sorted({str(path) for path in list_images(list_names(images))})
    options = find.keywords
    folder = expand_home(output)
    find(images=paths, output=folder)

    _show(folder)
    if "html" in options["formats"]:
        echo(f"open {folder / 'gallery.html'} in a browser")


def _list_methods() -> dict[str, list[tuple[str, str]]]:
    """Return the sections of the help about map methods and their options."""
    from vit.explanation.methods.registry import METHODS

    methods = []
    options: dict[str, tuple[list[str], str]] = {}
    for method in METHODS.values():
        condition = " (models without attention)" if method.models == "feature map" else ""
        methods.append((method.name, method.title + condition))
        for name, text in method.describe_options().items():
            options.setdefault(name, ([], text))[0].append(method.name)
    return {
        "Methods": methods,
        "Options of methods, set by --option NAME=VALUE": [
            (name, f"{text} Used by {', '.join(names)}.".strip())
            for name, (names, text) in options.items()
        ],
    }


COMMAND = Command(
    run=explain,
    function="explain",
    flags={
        "methods": "--method",
        "target": "--class",
        "formats": "--format",
        "checks": "--checks/--no-checks",
        "captions": "--caption/--no-caption",
    },
    old_flags={"--images": "--num-images"},
    rare=("scale", "max_side", "precision", "random_weights"),
    python_only=("class_names", "preprocess"),
    rare_into="map_options",
    sections=_list_methods,
    alias="attention",
)


def _show(output: Path) -> None:
    # torch takes seconds to import, and `vit --help` does without
    from vit.explanation.checks.sanity_checks import count_confirmed
    from vit.explanation.methods.sinks import count_sinks
    from vit.explanation.writer import SHEET_FILE

    # the manifest also has the images of an earlier command
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    verdicts: dict[str, list[str]] = {}
    sink_fractions: dict[str, list[float]] = {}
    for entry in (entry for image in manifest["images"] for entry in image["maps"]):
        method = entry["method"]
        if check := entry["sanity_check"]:
            verdicts.setdefault(method, []).append(check["verdict"])
        sink_fractions.setdefault(method, []).append(entry["sink_fraction"])
    for line in count_confirmed(verdicts) + count_sinks(sink_fractions):
        echo(line)

    unreadable = manifest["unreadable"]
    for image in unreadable:
        echo(f"skipped {image['path']}: {image['reason']}", color="yellow")
    skipped = f", {len(unreadable)} skipped" if unreadable else ""
    count = len(manifest["images"])
    echo(f"{count} image{'s' * (count != 1)} explained{skipped}: {output}")

    if (output / SHEET_FILE).is_file():
        echo(f"open {output / SHEET_FILE} first: photos and maps side by side")
