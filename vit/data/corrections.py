"""Corrected labels, from the `corrections.csv` of an audit. The image files stay where they are."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vit.data.dataset import ImageDataset
from vit.runtime.arguments import check_choice, shorten
from vit.runtime.documents import read_rows

COLUMNS = ("path", "given", "label")
# separates the labels of an image that may have several
SEPARATOR = "|"


def read_corrections(path: str | Path | Mapping[str, str] | None) -> dict[str, str]:
    """Read corrections, from a CSV file with the columns path, given (the present label) and label,
    unless they are read already: path of an image below the root → the name of its right class, or
    of all its right labels with "|" between them. Raises ValueError for a wrong line."""
    if not isinstance(path, str | Path):
        return dict(path or {})
    corrections: dict[str, str] = {}
    for line, row in read_rows(Path(path)):
        if tuple(row) != COLUMNS:
            raise ValueError(
                f"{path} line 1 is not {','.join(COLUMNS)}; take the file that an audit saved"
            )
        name, label = row["path"], row["label"]
        if corrections.setdefault(name, label) != label:
            raise ValueError(f"{line} gives {shorten(name)!r} a second label; keep one")
    return corrections


def correct_labels(dataset: ImageDataset, corrections: Mapping[str, str]) -> ImageDataset:
    """Replace the labels of the images whose ids are in `corrections`. Raises ValueError if a label
    is not one of the classes."""
    labels = dataset.labels.copy()
    for index, image_id in enumerate(dataset.ids):
        if image_id not in corrections:
            continue
        names = [corrections[image_id]]
        if dataset.is_multilabel:
            names = list(filter(None, names[0].split(SEPARATOR)))
        for name in names:
            check_choice(name, dataset.class_names, name=f"label of {image_id} in data.corrections")
        marks = [name in names for name in dataset.class_names]
        labels[index] = marks if dataset.is_multilabel else marks.index(True)
    num_changed = int((labels != dataset.labels).sum())
    if num_changed == 0:
        return dataset
    note = f"{num_changed} labels of the {dataset.split} images are those of data.corrections"
    # decoded pixels don't depend on labels
    return replace(dataset, labels=labels, notes=(*dataset.notes, note))


def check_corrections(dataset: ImageDataset, corrections: Mapping[str, str]) -> None:
    """Raise ValueError if a correction names an image that is not in `dataset`, all images."""
    unknown = corrections.keys() - set(dataset.ids)
    if unknown:
        raise ValueError(
            f"data.corrections names {len(unknown)} images that are not among those of"
            f" {dataset.name}, such as {shorten(min(unknown))!r}; audit these images again"
        )
