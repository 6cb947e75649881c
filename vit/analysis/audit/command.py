"""`vit audit`: likely label errors, near-duplicates and odd images of a data set."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vit.options import AuditOptions

if TYPE_CHECKING:
    from vit.analysis.audit.suspects import Audit


def audit(images: str, *, output: Path, options: AuditOptions, overwrite: bool = False) -> None:
    """Look for wrong labels, near-duplicates, odd images and classes that can't be told apart.

    Writes audit.json and audit.html, a page on which each suspect is accepted or rejected and which
    saves corrections.csv: vit train IMAGES data.corrections=corrections.csv applies it. No image is
    changed, moved or deleted.

    Args:
        images: a data set, a folder with a folder for each class, a table or shards
        output: directory for the results
        overwrite: replace an earlier result
    """
    # torch, which `vit --help` does without
    from vit import api
    from vit.runtime.files import check_output

    # before minutes of work
    check_output(output, overwrite=overwrite)
    result = api.audit(images, **vars(options))
    result.save(output, overwrite=overwrite)
    _show(result.audit, output)


def _show(audit: "Audit", output: Path) -> None:
    between = sum(pair.classes[0] != pair.classes[1] for pair in audit.near_duplicates)
    typer.echo(
        f"{audit.num_images:,} images of {audit.data}; a linear classifier on these features is"
        f" right on {audit.top1:.1%} of images that it did not see"
    )
    typer.echo(f"{len(audit.label_errors)} likely label errors")
    for error in audit.label_errors[:5]:
        typer.echo(f"  {error.path}: {error.given}, rather {error.suggested} ({error.score:.3f})")
    typer.echo(f"{len(audit.near_duplicates)} near-duplicates, {between} of them across classes")
    typer.echo(f"{len(audit.outliers)} images unlike all others")
    for name, described in audit.properties.items():
        if described.odd:
            typer.echo(
                f"{len(described.odd)} images of odd {name}, such as {described.odd[0].path}"
            )
    for pair in audit.confused_classes[:5]:
        first, second = pair.classes
        typer.echo(
            f"{first} and {second} are hard to tell apart: {pair.confused} of {pair.count} images"
        )
    for name, reason in audit.unreadable[:5]:
        typer.secho(f"skipped {name}: {reason}", fg="yellow")
    typer.echo(f"open {output / 'audit.html'} in a browser")
