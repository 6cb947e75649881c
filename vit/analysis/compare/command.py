"""`vit compare`: the difference between two evaluations, with the images behind it."""

from pathlib import Path
from typing import Any

from vit.runtime.arguments import shorten
from vit.runtime.command import Command
from vit.runtime.console import build_console
from vit.runtime.numbers import format_percent


def compare(found: Any, output: Path) -> None:
    """Compare two evaluations of the same images.

    By McNemar's exact test. Where an image may have several labels, all of them have to be right.
    Writes comparison.json, with all images that only one has right.
    """
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
    console.print(f"written to {output}")


COMMAND = Command(run=compare, function="compare", is_saved=True)
