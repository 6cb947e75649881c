"""`vit compare`: differences between evaluations, with the classes and images behind them."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from vit.runtime.arguments import check_arguments
from vit.runtime.command import Call, Command
from vit.runtime.console import build_console, build_table
from vit.runtime.files import compute_and_save
from vit.runtime.numbers import (
    format_difference,
    format_interval,
    format_number,
    format_percent,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vit.analysis.compare.comparison import Pair


@check_arguments(num_examples=(0, None))
def compare(
    find: Call, *, output: Path | None = None, num_examples: int = 5, overwrite: bool = False
) -> None:
    """Compare evaluations of the same images.

    All are compared with the first, by McNemar's test, or for several labels an image by the
    jackknife of the mean average precision, with Holm's correction. Runs that differ in their seeds
    are compared by Welch's t-test.

    Args:
        output: Directory for comparison.json, with all images. None: it isn't written.
        num_examples: Classes and images to show.
        overwrite: Replace an earlier result.
    """
    if output is None:
        comparison = find()
    else:
        comparison = compute_and_save(find, output, overwrite=overwrite)
    evaluation = comparison.groups[0].evaluations[0].evaluation
    rows = []
    for group in comparison.groups:
        # With one seed the interval covers the choice of images, with several the seeds differ.
        if group.deviation is None:
            interval = group.evaluations[0].evaluation.intervals[group.metric]
            spread = format_interval(interval, evaluation.num_images)
        else:
            spread = f"± {100 * group.deviation:.2g} %"
        value = format_percent(group.values.mean(), evaluation.num_images)
        loss = format_number(group.loss) if math.isfinite(group.loss) else "–"
        rows.append((group.name, len(group.evaluations), value, spread, loss))
    title = _TITLES[comparison.groups[0].metric]
    table = build_table(
        rows,
        ("evaluation", "seeds", title, "± sd or 95 % interval", "loss"),
        title=f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})",
    )
    console = build_console()
    console.print(table)
    for note in comparison.notes:
        console.print(note, style="yellow")
    for pair in comparison.pairs:
        _show_pair(
            console,
            pair,
            num_images=evaluation.num_images,
            num_pairs=len(comparison.pairs),
            num_examples=num_examples,
        )
    if output is not None:
        console.print(f"written to {output}")


_TITLES = {
    "top1": "top-1",
    "map": "mAP",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "exact_match": "exact match",
}

COMMAND = Command(
    run=compare,
    function="compare",
    old_flags={"--examples": "--num-examples"},
    help={"evaluations": "Two or more directories of vit evaluate."},
)


def _show_pair(
    console: "Console", pair: "Pair", *, num_images: int, num_pairs: int, num_examples: int
) -> None:
    difference, low, high = (
        format_difference(value, num_images) for value in (pair.difference, *pair.interval)
    )
    title = _TITLES["map" if pair.metrics else "top1"]
    detectable = format_percent(pair.detectable, num_images).removesuffix(" %")
    correction = f" corrected for {num_pairs} comparisons" if num_pairs > 1 else ""
    verdict = "significant" if pair.is_significant else "not significant"
    console.print(
        f"\n{pair.b} against {pair.a}: {title} {difference} percentage points"
        f" (95 % interval {low} to {high}): difference {verdict}"
        f" ({pair.test}, p = {pair.corrected_p_value:.2g}{correction});"
        f" a true difference of {detectable} point{'s' * (detectable != '1')} or more would be found 8 times in 10"
    )
    for metric in pair.metrics[1:]:
        difference, low, high = (
            format_difference(value, num_images)
            for value in (metric.value_b - metric.value_a, *metric.interval)
        )
        console.print(f"  {_TITLES[metric.metric]} {difference} (95 % interval {low} to {high})")
    for label in pair.label_changes[:num_examples]:
        before = format_percent(label.average_precision_a, label.support)
        after = format_percent(label.average_precision_b, label.support)
        text = f"average precision {before} → {after} ({label.support} images)"
        console.print(f"  {label.name}: {text}")
    for change in pair.recall_changes[:num_examples]:
        before = format_percent(change.recall_a, change.support)
        after = format_percent(change.recall_b, change.support)
        console.print(f"  {change.name}: {before} → {after} of {change.support} images correct")
    for name, images in ((pair.a, pair.only_a), (pair.b, pair.only_b)):
        shown = ", ".join(images[:num_examples])
        if len(images) > num_examples > 0:
            shown += ", …"
        which = f"that only {name} predicts correctly"
        if pair.metrics:
            which = f"of which only {name} has all labels right"
        if shown:
            which += f": {shown}"
        plural = "s" * (len(images) != 1)
        console.print(f"  {len(images)} image{plural} {which}")
