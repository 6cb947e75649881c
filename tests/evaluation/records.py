"""Evaluations made up for a test."""

import hashlib
from pathlib import Path

import numpy as np

from vit.evaluation.metrics import (
    bin_confidence,
    compute_metrics,
    measure,
    score_logits,
)
from vit.evaluation.predictions import PREDICTIONS_FILE, write_predictions
from vit.evaluation.result import EVALUATION_FILE, Cost, Evaluation
from vit.runtime.files import write_json


def write_evaluation(
    folder: Path,
    name: str,
    ranks: np.ndarray,
    *,
    fingerprint: str = "0" * 64,
    model_sha256: str | None = None,
    reverse: bool = False,
) -> Path:
    """An evaluation directory of four classes in which the labels have the given ranks (0 is a
    hit)."""
    names = tuple(f"class {index}" for index in range(4))
    labels = np.arange(len(ranks)) % 4
    logits = np.zeros((len(ranks), 4), dtype=np.float32)
    rows = np.arange(len(ranks))
    logits[rows, labels] = 1
    for ahead in range(1, 4):
        logits[rows, (labels + ahead) % 4] = np.where(ranks >= ahead, 2, 0)
    scores = score_logits(logits, labels)
    assert (scores.rank == ranks).all()
    ids = [f"test/{index:04d}.png" for index in rows]
    if reverse:
        order = rows[::-1]
        logits, ids = logits[order], ids[::-1]
        scores = score_logits(logits, labels[order])
    directory = folder / name
    directory.mkdir()
    write_predictions(directory / PREDICTIONS_FILE, scores, ids=ids, class_names=names)
    metrics = compute_metrics(scores)
    evaluation = Evaluation(
        task="classes",
        metrics=metrics,
        intervals=dict.fromkeys(metrics, (0.0, 1.0)),
        per_class=measure(scores, None, names).per_class,
        reliability=bin_confidence(scores),
        num_images=len(scores),
        num_groups=len(scores),
        unreadable=[],
        duplicates_of_training=None,
        cost=Cost(1, 2, 3.0),
        data="made up",
        split="test",
        notes=[],
        fingerprint=fingerprint,
        model=name,
        model_sha256=model_sha256 or hashlib.sha256(name.encode()).hexdigest(),
        conditions={"precision": "float32", "device": "none"},
    )
    write_json(directory / EVALUATION_FILE, evaluation.model_dump(mode="json"))
    return directory
