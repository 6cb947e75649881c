"""The metrics file of a run: a JSON object for each epoch, one a line."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vit.runtime.documents import check_schema, parse_json
from vit.runtime.files import read_text, write_text

METRICS_FILE = "metrics.jsonl"


class _EpochMetrics(BaseModel):
    """A line of the metrics file."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, float | None]
    epoch: int = Field(ge=0, lt=2**53)
    step: int = Field(ge=0, lt=2**53)


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file, one dictionary an epoch; none where there is no file.

    Raises:
        ValueError: a line is not an object of numbers with its epoch and step.
    """
    if not path.is_file():
        return []
    # what stands behind the last line break was being written when its run was killed
    lines = read_text(path).split("\n")[:-1]
    epochs: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        origin = f"{path} line {number}"
        metrics = parse_json(line, origin=origin)
        check_schema(_EpochMetrics, metrics, origin=origin)
        epochs.append(metrics)
    return epochs


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Add an epoch's line. Lines of this step and later ones go, as does a half-written one: they
    are of a process that was killed before it saved the step."""
    earlier = [line for line in load_metrics(path) if line["step"] < metrics["step"]]
    write_text(path, "".join(json.dumps(line) + "\n" for line in [*earlier, metrics]))
