"""`vit compare`: differences between evaluations, their significance, and the classes and images behind them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit.cli.common import Overwrite, build_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vit.evaluation.comparison import Group, Pair

ALL_DIFFERENCES = "directory for comparison.json: all classes, all images"


def compare(
    evaluations: Annotated[list[Path], typer.Argument(help="two or more directories of vit evaluate")],
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=ALL_DIFFERENCES)] = None,
    examples: Annotated[int, typer.Option(min=0, help="classes and images to show")] = 5,
    overwrite: Overwrite = False,
) -> None:
    """Compare evaluations on the same images: paired bootstrap and McNemar's test.

    Runs of one recipe with different seeds are shown as mean ± standard deviation. Everything is compared
    with the first.
    """
    from vit import api
    from vit.runtime.output_dir import check_output

    if output is not None:
        check_output(output, overwrite=overwrite)
    comparison, console = api.compare(evaluations), build_console()
    _show_groups(console, comparison.groups)
    for pair in comparison.pairs:
        _show_pair(console, pair, examples=examples)
    if output is not None:
        comparison.save(output, overwrite=overwrite)
        console.print(f"written to {output}")


def _show_groups(console: "Console", groups: "Sequence[Group]") -> None:
    from rich.table import Table

    evaluation = groups[0].evaluations[0].evaluation
    table = Table(title=f"{evaluation.num_images:,} images of {evaluation.data} ({evaluation.split})")
    table.add_column("evaluation", overflow="fold")
    for column in ("seeds", "top-1", "± sd or 95 % interval", "loss"):
        table.add_column(column, justify="right")
    for group in groups:
        low, high = group.evaluations[0].evaluation.intervals["top1"]
        spread = f"{low:.4f} … {high:.4f}" if group.deviation is None else f"± {group.deviation:.4f}"
        top1, loss = f"{group.top1.mean():.4f}", f"{group.loss:.4f}"
        table.add_row(group.name, str(len(group.evaluations)), top1, spread, loss)
    console.print(table)


def _show_pair(console: "Console", pair: "Pair", *, examples: int) -> None:
    low, high = pair.interval
    verdict = "not significant (95 % interval holds 0)" if low <= 0 <= high else "significant (95 % interval without 0)"
    test = "" if pair.p_value is None else f", McNemar p = {pair.p_value:.2g}"
    top1 = f"top-1 {pair.difference:+.4f} (95 % {low:+.4f} … {high:+.4f}{test})"
    console.print(f"\n{pair.b} against {pair.a}: {top1}: difference {verdict}")
    for change in pair.recall_changes[:examples]:
        text = f"  {change.name}: {change.recall_a:.4f} → {change.recall_b:.4f} of {change.support}"
        console.print(text)
    for name, images in ((pair.a, pair.only_a), (pair.b, pair.only_b)):
        shown = ", ".join(images[:examples]) + (", …" if len(images) > examples else "")
        console.print(f"  {len(images)} images that only {name} predicts correctly: {shown}")
