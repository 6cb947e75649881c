"""Predictions that `vit predict` has written, which save a second pass over the images."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.special import logit

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset, check_unreadable
from vit.data.sources.base import SPLIT_OF
from vit.data.sources.remote import is_remote
from vit.prediction.probabilities import Float32s
from vit.runtime.arguments import shorten

# nearest to 0 and to 1
_SMALLEST, _LARGEST = 1e-45, 1 - 1e-16


def read_written(
    place: str | Path, dataset: ImageDataset, column: str
) -> tuple[ImageDataset, Float32s]:
    """Read a column of written predictions, such as "embedding".

    Returns:
        The images that could be read, and a row of the column for each.

    Raises:
        ValueError: There is no such column, or not exactly one prediction of each image. Its path
            ends in the image's name, which is the path below the folder of the data, or names a
            row of a Parquet file.
    """
    # from the extra "datasets"
    import pyarrow.dataset as arrow  # type: ignore[import-untyped]

    folder, filesystem = str(place), None
    if is_remote(place):
        import fsspec

        filesystem, folder = fsspec.url_to_fs(folder)
    files = arrow.dataset(folder, filesystem=filesystem, format="parquet")
    if column not in files.schema.names:
        raise ValueError(f"{place} has no column {column}; vit predict writes it")
    table = files.to_table(columns=["path", "error", column])
    paths = _number_rows(table["path"].to_pylist(), {name.split("/")[0] for name in dataset.ids})
    depths = {name.count("/") + 1 for name in dataset.ids}
    rows: dict[str, list[int]] = {}
    for row, path in enumerate(paths):
        parts = path.split("/")
        for depth in depths:
            rows.setdefault("/".join(parts[-depth:]), []).append(row)
    chosen = []
    for name in dataset.ids:
        found = rows.get(name, [])
        if len(found) != 1:
            text = f"{len(found)} predictions of {shorten(name)}, not one"
            raise ValueError(f"{place} has {text}; predict these images again")
        chosen += found
    table = table.take(chosen)
    reasons = list(zip(dataset.ids, table["error"].to_pylist(), strict=True))
    readable = [index for index, (_, error) in enumerate(reasons) if error is None]
    unreadable = [(name, error) for name, error in reasons if error is not None]
    check_unreadable(unreadable, len(reasons), fraction=0.05)
    values = np.array(table.take(readable)[column].to_pylist(), dtype=np.float32)
    return replace(dataset.subset(readable), unreadable=unreadable), values


def _number_rows(paths: Sequence[str], splits: Collection[str]) -> list[str]:
    """Name images in rows of Parquet files as their data set does: the row FILE/00017 of a split's
    second file, after 2,000 rows of the first, is SPLIT/02017."""
    rows = [re.fullmatch(r"(.+[.]parquet)/([0-9]+)", path) for path in paths]
    sizes = Counter(row[1] for row in rows if row is not None)
    split_of: dict[str, str] = {}
    starts: dict[str, int] = {}
    totals: Counter[str] = Counter()
    for file in sorted(sizes):
        # the split is named by the file, "train-00000.parquet", or by its folder
        words = [re.split("[^a-z]", part.lower())[0] for part in file.split("/")[:-3:-1]]
        split = next((SPLIT_OF[word] for word in words if word in SPLIT_OF), "train")
        if len(sizes) == 1 and len(splits) == 1:
            (split,) = splits
        split_of[file], starts[file] = split, totals[split]
        totals[split] += sizes[file]
    return [
        path if row is None else f"{split_of[row[1]]}/{starts[row[1]] + int(row[2]):05d}"
        for path, row in zip(paths, rows, strict=True)
    ]


def convert_to_logits(bundle: Bundle, probabilities: Float32s) -> Float32s:
    """Return logits, [n, C], of which these are the model's probabilities."""
    values = np.clip(probabilities.astype(np.float64), _SMALLEST, _LARGEST)
    values = logit(values) if bundle.is_multilabel else np.log(values)
    logits: Float32s = (values * bundle.temperature).astype(np.float32)
    return logits
