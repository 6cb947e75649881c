"""`vit explain`: attention maps of photos, with pictures and a manifest."""

import json
from pathlib import Path

from vit.cli.predict import check_images, list_names, take_models
from vit.runtime.command import Call, Command
from vit.runtime.console import echo


def explain(
    find: Call,
    images: list[str] | None = None,
    *,
    output: Path,
) -> None:
    """Show which parts of an image explain the prediction.

    Writes index.png (look at it first: up to 24 photos), NAME.METHOD.png, maps.npz (exact values),
    manifest.json and, with --format html, a gallery.

    Args:
        images: Files, folders, or - for a list on standard input. None: the model's test split.
            Models before them are averaged with MODEL.
        output: Directory for the results.
    """
    # torch takes seconds to import, and `vit --help` does without
    from vit.data.images import list_images
    from vit.explanation.patch_removal import count_confirmed
    from vit.explanation.writer import SHEET_FILE

    paths = None
    models, images = take_models(find.keywords["model"], images or [])
    if images:
        check_images(models, images)
        paths = sorted({str(path) for path in list_images(list_names(images))})
    find(images=paths, model=models, output=output)
    manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
    for line in count_confirmed(manifest["images"]):
        echo(line)
    count = len(manifest["images"])
    num_tested = manifest["parameters"]["checks"]
    if num_tested and num_tested < count:
        echo(f"the maps of the first {num_tested} images are tested; --checks tests all")
    for image in manifest["unreadable"]:
        echo(f"skipped {image['path']}: {image['reason']}", color="yellow")
    echo(f"images explained: {count}; skipped: {len(manifest['unreadable'])}; in {output}")
    if (output / SHEET_FILE).is_file():
        echo(f"open {output / SHEET_FILE} first: photos and maps side by side")
    if "html" in find.keywords["formats"]:
        echo(f"open {output / 'gallery.html'} in a browser")


COMMAND = Command(
    run=explain,
    function="explain",
    flags={
        "methods": "--method",
        "target": "--class",
        "formats": "--format",
        "checks": "--checks/--no-checks",
    },
    python_only=("class_names", "preprocess", "map_options"),
)
