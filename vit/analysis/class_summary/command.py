"""The command `vit explain --summary`."""

from pathlib import Path

from vit.runtime.command import Call
from vit.runtime.console import echo
from vit.runtime.files import compute_and_save


def write_summary(summarize: Call, *, output: Path, overwrite: bool) -> None:
    """Save the summary of a model's classes, and print what it found.

    Args:
        summarize: `vit.summarize_classes` with its arguments.
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    summary = compute_and_save(summarize, output, overwrite=overwrite).summary
    for name, cluster in summary.flagged:
        removal = cluster.removal
        echo(
            f"likely shortcut of {name}: patches {', '.join(cluster.suspicions)}; without them"
            f" {removal.flips} of {removal.num_images} other predictions change, without the"
            f" same shape elsewhere {removal.random_flips}",
            color="yellow",
        )
    noun = "labels" if summary.is_multilabel else "classes"
    echo(
        f"{len(summary.classes)} {noun} by {summary.method}, {summary.num_tests} suspicious"
        f" clusters tested, {len(summary.flagged)} flagged (false alarms in at most"
        f" {100 * summary.false_alarm_rate:.0f} % of summaries)"
    )
    echo(f"open {output / 'summary.html'} in a browser")
