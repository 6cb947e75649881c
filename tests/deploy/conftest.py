"""Fixtures of the core's tests that tests of exports and the server use, and models of every task."""

from dataclasses import replace
from pathlib import Path

from tests.browser import browser
from vit.model.model_file import read_model_file, write_model_file

__all__ = ["TASKS", "browser", "change_task"]

# what a model predicts → thresholds by place; None for no operating point
TASKS = {
    "classes": None,
    "class from a threshold": {1: 0.2},
    "labels": None,
    "labels from thresholds": {0: 0.3, 2: 0.7},
}


def change_task(source: Path, path: Path, task: str) -> Path:
    """Write a copy of a model file for another of `TASKS`."""
    content = read_model_file(source)
    metadata = dict(content.metadata)
    if "labels" in task:
        metadata["data"] = {**metadata["data"], "task": "multilabel"}
    if places := TASKS[task]:
        names = metadata["class_names"]
        thresholds = {names[place]: value for place, value in places.items()}
        metadata["operating_point"] = {"rule": "f1", "thresholds": thresholds, "num_images": 50}
    write_model_file(path, replace(content, metadata=metadata))
    return path
