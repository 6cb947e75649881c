"""Evaluations that were written before."""

from contextlib import suppress
from pathlib import Path

from vit.bundle import MULTILABEL
from vit.evaluation.label_result import LabelEvaluation
from vit.evaluation.result import EVALUATION_FILE, SCHEMA_VERSION, Evaluation
from vit.runtime.documents import check_schema, read_json


def load_evaluation(path: Path) -> Evaluation | LabelEvaluation:
    """Read an evaluation file.

    Raises:
        ValueError: The file is damaged or from another version.
    """
    try:
        values = read_json(path)
        version = values.get("schema_version") if isinstance(values, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"it has schema version {version}, not {SCHEMA_VERSION}")
        if values.get("task") == MULTILABEL:
            return check_schema(LabelEvaluation, values, origin="it")
        return check_schema(Evaluation, values, origin="it")
    except ValueError as error:
        raise ValueError(
            f"{path} is not an evaluation of this version: {error}; evaluate again"
        ) from None


def find_evaluation(model: str, sha256: str) -> Evaluation | LabelEvaluation | None:
    """Return the latest evaluation of the model file with this hash, in or beside the run that
    `model` names; None if there is none."""
    run = Path(model) if Path(model).is_dir() else Path(model).parent
    evaluations = []
    for path in (*run.glob(f"*/{EVALUATION_FILE}"), *run.parent.glob(f"*/{EVALUATION_FILE}")):
        # a file of another version, or a damaged one, is skipped
        with suppress(ValueError, OSError):
            evaluations.append(load_evaluation(path))
    return max(
        (evaluation for evaluation in evaluations if evaluation.model_sha256 == sha256),
        key=lambda evaluation: evaluation.conditions.get("time") or "",
        default=None,
    )
