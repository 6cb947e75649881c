"""`vit audit`: likely label errors, near-duplicates and odd images of a data set."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vit.runtime.command import Command
from vit.runtime.files import check_output

if TYPE_CHECKING:
    from vit.analysis.audit.run import AuditResult
    from vit.analysis.audit.suspects import Audit


def audit(find: "partial[AuditResult]", *, output: Path, overwrite: bool = False) -> None:
    """Find wrong labels, near-duplicates and odd images.

    Also says which classes can't be told apart. Writes audit.json and audit.html, a page on which
    each suspect is accepted or rejected. It saves corrections.csv, which vit train IMAGES
    data.corrections=corrections.csv applies. No image is changed, moved or deleted. It needs
    cleanlab: pip install 'vit-pipeline[audit]'.

    Args:
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    # before minutes of work
    check_output(output, overwrite=overwrite)
    result = find()
    result.save(output, overwrite=overwrite)
    _show(result.audit, output)


COMMAND = Command(run=audit, function="audit", flags={"data": "images"})


def _show(audit: "Audit", output: Path) -> None:
    between = sum(pair.classes[0] != pair.classes[1] for pair in audit.near_duplicates)
    typer.echo(
        f"{audit.num_images:,} images of {audit.data}; a linear classifier on these features"
        f" predicts {audit.top1:.1%} of them correctly without having seen them"
    )
    typer.echo(f"{len(audit.label_errors)} likely label errors")
    for error in audit.label_errors[:5]:
        typer.echo(f"  {error.path}: {error.given}, probably {error.suggested} ({error.score:.3f})")
    typer.echo(f"{len(audit.near_duplicates)} near-duplicates, {between} of them across classes")
    typer.echo(f"{len(audit.outliers)} unusual images")
    for name, described in audit.properties.items():
        if described.odd:
            example = described.odd[0].path
            typer.echo(f"{len(described.odd)} images with odd {name}, such as {example}")
    for pair in audit.confused_classes[:5]:
        first, second = pair.classes
        count = f"{pair.confused} of {pair.count} images"
        typer.echo(f"{first} and {second} are hard to tell apart: {count} are confused")
    for name, reason in audit.unreadable[:5]:
        typer.secho(f"skipped {name}: {reason}", fg="yellow")
    typer.echo(f"open {output / 'audit.html'} in a browser")
