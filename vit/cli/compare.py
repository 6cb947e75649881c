"""`vit compare`: is the difference between evaluations real?"""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    evaluations: Annotated[
        list[Path], typer.Argument(help="two or more directories that vit evaluate wrote")
    ],
) -> None:
    """Compare evaluations on the same images: paired bootstrap and McNemar's test."""
    from rich.console import Console
    from rich.table import Table

    from vit.evaluate.compare import compare_pair, load_arms

    arms = load_arms(evaluations)
    table = Table(title=f"{len(arms[0].predictions.ids):,} images, top-1")
    for column in ("A", "B", "top-1 A", "top-1 B", "B - A", "95 % interval", "McNemar p"):
        table.add_column(column, justify="left" if len(column) == 1 else "right")
    for other in arms[1:]:
        pair = compare_pair(arms[0], other)
        low, high = pair.interval
        table.add_row(
            arms[0].name,
            other.name,
            f"{arms[0].evaluation.top1:.4f}",
            f"{other.evaluation.top1:.4f}",
            f"{pair.difference:+.4f}",
            f"{low:+.4f} … {high:+.4f}",
            f"{pair.p_value:.3g}",
        )
    Console().print(table)
