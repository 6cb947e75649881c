"""`vit compare`: differences between evaluations, with the images behind them."""

from pathlib import Path
from typing import TYPE_CHECKING

from vit.runtime.command import Call, Command
from vit.runtime.console import build_console, build_table
from vit.runtime.files import compute_and_save
from vit.runtime.numbers import format_percent
from vit.runtime.signatures import check_arguments

if TYPE_CHECKING:
    from rich.console import Console

    from vit.analysis.compare.comparison import Pair


@check_arguments(num_examples=(0, None))
def compare(
    find: Call, *, output: Path | None = None, num_examples: int = 5, overwrite: bool = False
) -> None:
    """Compare evaluations of the same images.

    Each is compared with the first, by McNemar's exact test. Where an image may have several
    labels, all of them have to be right.

    Args:
        output: Directory for comparison.json, with all images. None: it isn't written.
        num_examples: Images to show.
        overwrite: Replace an earlier result.
    """
    if output is None:
        comparison = find()
    else:
        comparison = compute_and_save(find, output, overwrite=overwrite)
    first = comparison.evaluations[0]
    num_images = len(first.ids)
    rows = [
        (each.name, format_percent(each.accuracy, num_images)) for each in comparison.evaluations
    ]
    title = "all labels right" if first.is_multilabel else "accuracy"
    console = build_console()
    console.print(
        build_table(rows, ("evaluation", title), title=f"{num_images:,} images of {first.data}")
    )
    for pair in comparison.pairs:
        _show_pair(console, pair, title=title, num_images=num_images, num_examples=num_examples)
    if output is not None:
        console.print(f"written to {output}")


COMMAND = Command(run=compare, function="compare")


def _show_pair(
    console: "Console", pair: "Pair", *, title: str, num_images: int, num_examples: int
) -> None:
    difference, low, high = (f"{100 * value:+.1f}" for value in (pair.difference, *pair.interval))
    verdict = "significant" if pair.is_significant else "not significant"
    console.print(
        f"\n{pair.b} against {pair.a}: {title} {difference} percentage points"
        f" (95 % interval {low} to {high}): difference {verdict}"
        f" (McNemar's exact test, p = {pair.p_value:.2g})"
    )
    for name, images in ((pair.a, pair.only_a), (pair.b, pair.only_b)):
        shown = ", ".join(images[:num_examples])
        if len(images) > num_examples > 0:
            shown += ", …"
        plural = "s" * (len(images) != 1)
        suffix = f": {shown}" if shown else ""
        console.print(f"  {len(images)} image{plural} that only {name} has right{suffix}")
