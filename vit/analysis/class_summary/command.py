"""The command `vit explain --summary`."""

from functools import partial
from pathlib import Path

import typer

from vit.analysis.class_summary.records import Summary
from vit.analysis.class_summary.summarize import SummaryResult
from vit.runtime.files import check_output


def write_summary(
    summarize: "partial[SummaryResult]", *, output: Path, overwrite: bool = False
) -> None:
    """Save the summary of a model's classes, and print what it found.

    Args:
        summarize: `vit.summarize_classes` with its arguments.
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    # before minutes of work
    check_output(output, overwrite=overwrite)
    result = summarize()
    result.save(output, overwrite=overwrite)
    _show(result.summary)
    typer.echo(f"open {output / 'summary.html'} in a browser")


def _show(summary: Summary) -> None:
    for name, cluster in summary.flagged:
        removal = cluster.removal
        assert removal is not None
        typer.secho(
            f"likely shortcut of {name}: patches {', '.join(cluster.suspicions)}; without them"
            f" {removal.flips} of {removal.num_images} other predictions change, without random"
            f" patches {removal.random_flips}",
            fg="yellow",
        )
    typer.echo(
        f"{len(summary.classes)} classes by {summary.method}, {summary.num_tests} suspicious"
        f" clusters tested, {len(summary.flagged)} flagged (false alarms in at most"
        f" {summary.false_alarm_rate:.0%} of summaries)"
    )
