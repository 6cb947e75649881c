"""Read and write the metrics file of a run: one line of JSON for each epoch."""

import json
from pathlib import Path
from typing import Any

from vit.runtime.documents import parse_json
from vit.runtime.files import read_text, write_atomically

METRICS_FILE = "metrics.jsonl"


def load_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one dictionary for each complete line of a metrics file; none without a file. Raises
    ValueError for a line that is not JSON."""
    if not path.is_file():
        return []
    # Text after the last line break was being written when the run was killed.
    lines = read_text(path).split("\n")[:-1]
    return [parse_json(line, origin=str(path)) for line in lines]


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Add the line of an epoch. Lines from this step on are removed, because the process that wrote
    them was killed before it saved the step."""
    earlier = [line for line in load_metrics(path) if line["step"] < metrics["step"]]
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in [*earlier, metrics]))
