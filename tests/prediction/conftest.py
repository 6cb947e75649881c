"""Fixtures of the evaluation's tests that tests of predictions use, and readers of predictions."""

import csv
import json
from pathlib import Path
from typing import Any

from tests.evaluation.conftest import bundle, images, make_evaluation, make_predictions

__all__ = ["bundle", "images", "make_evaluation", "make_predictions", "read_rows"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of predictions."""
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file))
