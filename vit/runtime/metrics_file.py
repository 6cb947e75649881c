"""Read and write the metrics file of a run: one line of JSON for each epoch."""

import json
from pathlib import Path
from typing import Any

from vit.runtime.documents import parse_json
from vit.runtime.files import read_text, write_text

METRICS_FILE = "metrics.jsonl"
# logits of a cross-validated run, see vit.evaluation.out_of_fold
OUT_OF_FOLD_FILE = "cross_validation.npz"


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one dictionary for each complete line of a metrics file; none without a file.

    Raises:
        ValueError: A line is not an object of numbers with its epoch and step.
    """
    if not path.is_file():
        return []
    epochs: list[dict[str, Any]] = []
    # Text after the last line break was being written when the run was killed.
    for number, line in enumerate(read_text(path).split("\n")[:-1], start=1):
        origin = f"{path} line {number}"
        metrics = parse_json(line, origin=origin)
        if not isinstance(metrics, dict) or not all(
            isinstance(value, int | float) or (value is None and name not in ("epoch", "step"))
            for name, value in ({"epoch": None, "step": None} | metrics).items()
        ):
            raise ValueError(f"{origin} is not the numbers of an epoch; move the file away")
        epochs.append(metrics)
    return epochs


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Add the line of an epoch.

    Lines of this step and later ones are removed, as is an incomplete one: the process that wrote
    them was killed before it saved the step.
    """
    earlier = [line for line in load_metrics(path) if line["step"] < metrics["step"]]
    write_text(path, "".join(json.dumps(line) + "\n" for line in [*earlier, metrics]))
