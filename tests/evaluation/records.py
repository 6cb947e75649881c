"""Evaluations made up for a test."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.evaluation.images import EvaluationSet
from vit.evaluation.metrics import Scores, measure, score_logits
from vit.evaluation.predictions import PREDICTIONS_FILE, save_predictions
from vit.evaluation.result import EVALUATION_FILE, Evaluation, EvaluationResult
from vit.runtime.files import format_json, write_atomically

NAMES = tuple(f"class {index}" for index in range(4))


def make_evaluation(scores: Scores, names: Sequence[str] = NAMES, **values: Any) -> Evaluation:
    """The evaluation of these scores, with other values if they are given."""
    metrics, intervals, per_class = measure(scores, None, names)
    facts: dict[str, Any] = {
        "task": "multilabel" if scores.is_multilabel else "classes",
        "metrics": metrics,
        "intervals": intervals,
        "per_class": per_class,
        "num_images": len(scores),
        "num_groups": len(scores),
        "unreadable": [],
        "duplicates_of_training": None,
        "data": "made up",
        "split": "test",
        "notes": [],
        "fingerprint": "0" * 64,
        "model": "model",
        "model_sha256": "a" * 64,
        "conditions": {"precision": "float32", "device": "none"},
    }
    return Evaluation(**{**facts, **values})


def write_evaluation(
    folder: Path,
    name: str,
    ranks: np.ndarray,
    *,
    fingerprint: str = "0" * 64,
    model_sha256: str | None = None,
    groups: Sequence[str] | None = None,
    reverse: bool = False,
) -> Path:
    """An evaluation directory of four classes in which the labels have the given ranks (0 is a
    hit)."""
    labels = np.arange(len(ranks)) % 4
    logits = np.zeros((len(ranks), 4), dtype=np.float32)
    rows = np.arange(len(ranks))
    logits[rows, labels] = 1
    for ahead in range(1, 4):
        logits[rows, (labels + ahead) % 4] = np.where(ranks >= ahead, 2, 0)
    order = rows[::-1] if reverse else rows
    logits, labels = logits[order], labels[order]
    scores = score_logits(logits, labels)
    assert (scores.rank == ranks[order]).all()
    evaluation = make_evaluation(
        scores,
        fingerprint=fingerprint,
        model=name,
        model_sha256=model_sha256 or hashlib.sha256(name.encode()).hexdigest(),
    )
    ids = tuple(f"test/{index:04d}.png" for index in order)
    dataset: Any = SimpleNamespace(ids=ids, groups=groups, digests=order.astype(np.uint64))
    preprocess = Preprocess((8, 8))
    images = EvaluationSet(dataset, ids, labels, preprocess)
    bundle = Bundle(torch.nn.Linear(1, 1), preprocess, NAMES, name=name, sha256="a" * 64)
    directory = folder / name
    directory.mkdir()
    result = EvaluationResult(evaluation, scores, logits, images, bundle)
    result.write_table(directory / "predictions.csv")
    save_predictions(directory / PREDICTIONS_FILE, dataset, scores, logits)
    write_atomically(directory / EVALUATION_FILE, format_json(evaluation.model_dump(mode="json")))
    return directory
