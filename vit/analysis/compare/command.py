"""`vit compare`: the difference between two evaluations, with the images behind it."""

from pathlib import Path

from vit.runtime.arguments import shorten
from vit.runtime.command import Call, Command
from vit.runtime.console import build_console
from vit.runtime.files import compute_and_save
from vit.runtime.numbers import format_percent


def compare(find: Call, *, output: Path | None = None, overwrite: bool = False) -> None:
    """Compare two evaluations of the same images.

    By McNemar's exact test. Where an image may have several labels, all of
    them have to be right.

    Args:
        output: Directory for comparison.json, with all images. None: it isn't written.
        overwrite: Replace an earlier result.
    """
    if output is None:
        found = find()
    else:
        found = compute_and_save(find, output, overwrite=overwrite)
    accuracies = [format_percent(value, found.num_images) for value in found.accuracies]
    difference, low, high = (f"{100 * value:+.1f}" for value in (found.difference, *found.interval))
    verdict = "significant" if found.is_significant else "not significant"
    console = build_console()
    console.print(
        f"{found.num_images:,} images: {found.a} has {accuracies[0]} right, {found.b}"
        f" {accuracies[1]}, {difference} percentage points (95 % interval {low} to {high}):"
        f" difference {verdict} (McNemar's exact test, p = {found.p_value:.2g})"
    )
    for name, images in ((found.a, found.only_a), (found.b, found.only_b)):
        shown = shorten(", ".join(images)) or "none"
        console.print(f"images that only {name} has right ({len(images)}): {shown}")
    if output is not None:
        console.print(f"written to {output}")


COMMAND = Command(run=compare, function="compare")
