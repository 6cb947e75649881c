"""`vit audit`: likely label errors, near-duplicates and odd images of a data set."""

from pathlib import Path

from vit.runtime.command import Call, Command
from vit.runtime.console import echo
from vit.runtime.files import compute_and_save
from vit.runtime.numbers import format_percent


def audit(find: Call, *, output: Path, overwrite: bool = False) -> None:
    """Find wrong labels, near-duplicates and odd images.

    Writes audit.json and audit.html, a page to accept or reject each suspect. It saves
    corrections.csv for vit train IMAGES data.corrections=corrections.csv. No image is changed. It
    needs cleanlab: pip install '.[audit]' in the clone of vit.

    Args:
        output: Directory for the results.
        overwrite: Replace an earlier result.
    """
    found = compute_and_save(find, output, overwrite=overwrite).audit
    kind = "classes" if found.map is None else "labels"
    between = sum(pair.classes[0] != pair.classes[1] for pair in found.near_duplicates)
    predicts = f"predicts {format_percent(found.top1, found.num_images)} of them correctly"
    if found.map is not None:
        mean = format_percent(found.map, found.num_images)
        predicts = f"predicts their labels with a mean average precision of {mean}"
    echo(
        f"{found.num_images:,} images of {found.data}; a linear classifier on these features"
        f" {predicts} without having seen them"
    )
    for sentence in found.warnings:
        echo(f"warning: {sentence}", color="yellow")
    judged = ""
    if found.num_judged < found.num_images:
        judged = f" among the {found.num_judged:,} images whose labels the classifier can judge"
    echo(f"{len(found.label_errors)} likely label errors{judged}")
    for error in found.label_errors[:5]:
        echo(f"  {error.path}: {error.describe()} ({error.score:.3f})")
    if found.always_trained:
        names = ", ".join(found.always_trained)
        echo(f"labels of {names} are not examined, because all of a class are one group")
    echo(f"{len(found.near_duplicates)} near-duplicates, {between} of them across {kind}")
    echo(f"{len(found.outliers)} unusual images")
    for name, described in found.properties.items():
        if described.odd:
            example = described.odd[0].path
            echo(f"{len(described.odd)} images with odd {name}, such as {example}")
    for pair in found.confused_classes[:5]:
        first, second = pair.classes
        count = f"{pair.confused} of {pair.count} images"
        echo(f"{first} and {second} are hard to tell apart: {count} are confused")
    for name, reason in found.unreadable[:5]:
        echo(f"skipped {name}: {reason}", color="yellow")
    echo(f"open {output / 'audit.html'} in a browser")


COMMAND = Command(
    run=audit,
    function="audit",
    flags={"data": "images"},
    old_flags={"--init": "--model"},
    python_only=("dataset", "class_names"),
)
