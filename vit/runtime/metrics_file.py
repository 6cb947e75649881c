"""Read and write the metrics file of a run: one line of JSON for each epoch."""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vit.runtime.documents import check_schema, parse_json
from vit.runtime.files import read_text, write_text

METRICS_FILE = "metrics.jsonl"
# logits of a cross-validated run, see vit.evaluation.out_of_fold
OUT_OF_FOLD_FILE = "cross_validation.npz"


class _EpochMetrics(BaseModel):
    """A line of the metrics file."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, float | None]
    epoch: int = Field(ge=0, lt=2**53)
    step: int = Field(ge=0, lt=2**53)


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file, one dictionary for each epoch; none without a file.

    Raises:
        ValueError: A line is not an object of numbers with its epoch and step.
    """
    if not path.is_file():
        return []
    # Text after the last line break was being written when the run was killed.
    lines = read_text(path).split("\n")[:-1]
    epochs: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        origin = f"{path} line {number}"
        metrics = parse_json(line, origin=origin)
        check_schema(_EpochMetrics, metrics, origin=origin)
        epochs.append(metrics)
    return epochs


def check_metrics(path: Path, *, steps_per_epoch: int) -> None:
    """Raise ValueError for a metrics file whose epochs have another number of steps."""
    for line in load_metrics(path):
        # The last epoch may be shorter.
        if line["epoch"] != math.ceil(line["step"] / steps_per_epoch):
            raise ValueError(
                f"{path} is of another run: epoch {line['epoch']} ends there at step"
                f" {line['step']}, an epoch has {steps_per_epoch} steps here; move it away"
            )


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Add the line of an epoch.

    Lines of this step and later ones are removed, as is an incomplete one: the process that wrote
    them was killed before it saved the step.
    """
    earlier = [line for line in load_metrics(path) if line["step"] < metrics["step"]]
    write_text(path, "".join(json.dumps(line) + "\n" for line in [*earlier, metrics]))
