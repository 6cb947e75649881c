"""`vit audit`: likely label errors, unusual images and near-duplicates of a data set."""

from pathlib import Path
from typing import Any

from vit.runtime.command import Command
from vit.runtime.console import echo
from vit.runtime.numbers import format_percent


def audit(result: Any, output: Path) -> None:
    """Find wrong labels, unusual images and near-duplicates.

    Writes audit.json and audit.html, a page to accept or reject each suspect. It saves
    corrections.csv for vit train IMAGES data.corrections=corrections.csv. No image is changed. It
    needs cleanlab: pip install '.[audit]' in the clone of vit.
    """
    found = result.audit
    between = sum(pair.classes[0] != pair.classes[1] for pair in found.near_duplicates)
    echo(
        f"{found.num_images:,} images of {found.data}; a linear classifier on these features"
        f" predicts {format_percent(found.top1, found.num_images)} of them correctly without having"
        " seen them"
    )
    echo(f"{len(found.label_errors)} likely label errors")
    for error in found.label_errors[:5]:
        given, suggested = (text or "no label" for text in (error.given, error.suggested))
        echo(f"  {error.path}: {given}, probably {suggested} ({error.score:.3f})")
    if found.not_examined:
        names = ", ".join(found.not_examined)
        echo(f"labels of {names} are not examined: all images of a class are one group")
    echo(f"{found.num_unusual} unusual images; the farthest from the others")
    for path, label, distance in found.unusual[:5]:
        echo(f"  {path}: {label}, distance {distance:.2f}")
    echo(f"{len(found.near_duplicates)} near-duplicates, {between} of them with different labels")
    for name, reason in found.unreadable[:5]:
        echo(f"skipped {name}: {reason}", color="yellow")
    echo(f"open {output / 'audit.html'} in a browser")


COMMAND = Command(run=audit, function="audit", is_saved=True, flags={"data": "images"})
