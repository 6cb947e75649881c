"""Which method measured best for a model: kept beside its file by `vit faithfulness`, read by `vit attention`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit.bundle import MODEL_FILE, Bundle
from vit.explanation.faithfulness.faithfulness_result import FaithfulnessResult
from vit.runtime.documents import read_json
from vit.runtime.files import write_text

BEST = "best"  # stands for the method in the file


@dataclass(frozen=True)
class BestMethod:
    """What was measured of a model file."""

    method: str
    among_the_best: tuple[str, ...]  # with tokens dropped: those whose interval of the difference to the best has 0
    gain: Mapping[str, float]  # symmetric relevance gain of the method: mean, low, high
    num_images: int

    def __str__(self) -> str:
        others = ", ".join(name for name in self.among_the_best if name != self.method)
        beside = f"; not told apart from it: {others}" if others else ""
        gain = "{mean:.2f}, 95 % interval {low:.2f} to {high:.2f}".format(**self.gain)
        return f"most faithful to this model on {self.num_images} images: {self.method} (gain {gain}){beside}"


def find_record(bundle: Bundle) -> Path | None:
    """The file beside the model file, there or not; None for a model that isn't a file."""
    path = Path(bundle.name)
    path = path / MODEL_FILE if path.is_dir() else path
    return path.with_suffix(".faithfulness.json") if path.is_file() else None


def write_best_method(bundle: Bundle, result: FaithfulnessResult) -> str:
    """Keep the best method beside the model file; the sentence says where, or why not."""
    if (path := find_record(bundle)) is None:
        return f"{bundle.name} is no model file, so that nothing is kept for --method best"
    metrics, keys = result.summary["metrics"], ("mean", "low", "high", "of_leave_one_out")
    gains = {metric: found for metric, found in metrics.items() if metric.startswith("srg")}
    content = {"schema_version": 1, **result.conditions, "best_method": result.summary["best_method"]}
    content["best"] = {metric: found["best"] for metric, found in gains.items()}
    content["gains"] = {
        metric: {name: {key: of[key] for key in keys} for name, of in found["methods"].items()}
        for metric, found in gains.items()
    }
    try:
        write_text(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        return f"nothing is kept for --method best: {path}: {error.strerror}"
    return f"{content['best_method']} is now what --method best takes: {path}"


def read_best_method(bundle: Bundle) -> BestMethod:
    """What `write_best_method` wrote. Raises ValueError where nothing was measured of this model file."""
    path, cure = find_record(bundle), f"run vit faithfulness {bundle.name}"
    if path is None:
        raise ValueError(f"{bundle.name} is no model file, beside which a best method is kept; name a method instead")
    if not path.is_file():
        raise ValueError(f"no best method is known of {bundle.name}; {cure} first")
    try:
        content: dict[str, Any] = read_json(path)
        name, gains, count = content["best_method"], content["gains"]["srg"], content["num_images"]
        gain = {key: float(gains[name][key]) for key in ("mean", "low", "high")}
        found = BestMethod(name, tuple(content["best"]["srg"]), gain, count)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; {cure} again") from error
    if content.get("model_sha256") != bundle.sha256:
        raise ValueError(f"{path} was measured of other weights; {cure} again")
    return found


def describe_best_method(bundle: Bundle) -> str:
    """A line about the best method, or why it can't be told; empty where nothing was ever measured."""
    path = find_record(bundle)
    if path is None or not path.is_file():
        return ""
    try:
        return f"{read_best_method(bundle)}; --method best takes it"
    except (ValueError, OSError) as error:
        return str(error)


def replace_best(methods: Sequence[str], bundle: Bundle) -> tuple[str, ...]:
    """`methods` with the one measured best in place of "best", each once."""
    return tuple(dict.fromkeys(read_best_method(bundle).method if name == BEST else name for name in methods))
