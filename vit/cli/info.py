"""`vit info`: what this machine will use, or what a model file holds."""

import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from vit.runtime.arguments import shorten
from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table
from vit.runtime.numbers import format_interval, format_percent

if TYPE_CHECKING:
    from vit.bundle import Bundle


def info(model: str | None = None) -> None:
    """Show what this machine will use, or what a model file holds.

    Args:
        model: See `vit.evaluate`.
    """
    facts = _describe_model(model) if model else _describe_machine()
    build_console().print(build_table(facts.items(), num_text_columns=2))


COMMAND = Command(run=info)


def _describe_machine() -> dict[str, object]:
    # torch takes seconds to import, and `vit --help` does without
    import torch

    from vit.bundle import collect_versions
    from vit.runtime.device import choose_device, choose_precision, describe_device

    device = choose_device("auto")
    return {
        **collect_versions(),
        "device": describe_device(device),
        "threads": torch.get_num_threads(),
        "precision": choose_precision("auto", device),
    }


def _describe_model(source: str) -> dict[str, object]:
    # torch takes seconds to import, and `vit --help` does without
    from vit.bundle import load_bundle
    from vit.data.open import name_data
    from vit.runtime.device import choose_device, choose_precision

    bundle = load_bundle(source)
    metadata = bundle.metadata
    num_parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    noun = "labels" if bundle.is_multilabel else "classes"
    shown: dict[str, object] = {
        "model": source,
        "parameters": f"{num_parameters:,}",
        noun: f"{len(bundle.class_names)}: {shorten(', '.join(bundle.class_names))}",
    }
    if evaluation := metadata.get("evaluation"):
        count = evaluation["num_images"]
        interval = format_interval((evaluation["top1_low"], evaluation["top1_high"]), count)
        shown["accuracy"] = (
            f"{format_percent(evaluation['top1'], count)} ({interval} with 95 % confidence) of"
            f" {count:,} images: {evaluation['images']}"
        )
    if not bundle.name.startswith("timm:"):
        shown |= _describe_run(source, metadata)
    shown |= _describe_answers(bundle)
    precision = choose_precision("auto", choose_device("auto"))
    shown["precision"] = f"{precision} here; compare machines with --precision float32"
    # the values of all keys, on one line for each section
    for section in ("architecture", "module", "preprocess", "versions"):
        values = metadata.get(section, {})
        if values:
            shown[section] = ", ".join(
                f"{key} {_describe_value(value)}"
                for key, value in values.items()
                if value is not None
            )
    if data := metadata.get("data"):
        counts = [
            f"{split['num_images']:,} {name}" for name, split in data.get("splits", {}).items()
        ]
        name = name_data(data.get("name", "–"), bundle.config.get("data", {}).get("root"))
        shown["data"] = f"{name}: {', '.join(counts)}"
        shown["fingerprint"] = data.get("fingerprint", "–")
    if limits := metadata.get("limits"):
        shown["limits"] = limits
    shown["sha256"] = bundle.sha256
    return shown


def _describe_run(source: str, metadata: Mapping[str, Any]) -> dict[str, object]:
    """Describe the training run that the model file lies in; empty for a file without one."""
    from vit.model.find_file import find_model
    from vit.runtime.documents import read_json
    from vit.runtime.metrics_file import METRICS_FILE, load_metrics
    from vit.training.run_directory import CROSS_VALIDATION_FILE

    model_file = find_model(source)
    if isinstance(model_file, str) or model_file.is_dir():
        return {}
    file = model_file.parent / METRICS_FILE
    epochs = []
    # with a damaged file only these lines are missing
    with suppress(ValueError):
        epochs = load_metrics(file)
    shown: dict[str, object] = {}
    if epochs:
        end = datetime.fromtimestamp(file.stat().st_mtime).astimezone()
        length = f"{len(epochs)} epochs, {epochs[-1]['step']:,} steps"
        shown["trained"] = f"{length}, until {end:%Y-%m-%d %H:%M}"
    elif metadata.get("step") == 0:
        end = datetime.fromtimestamp(model_file.stat().st_mtime).astimezone()
        shown["trained"] = f"linear probe only, {end:%Y-%m-%d %H:%M}"
    if "evaluation" in metadata:
        return shown
    validated = [epoch["val_top1"] for epoch in epochs if epoch.get("val_top1") is not None]
    if validation := metadata.get("validation"):
        top1, count = validation["top1"], validation["num_images"]
        shown["accuracy"] = (
            f"{round(top1 * count):,} of {count:,} validation images ({format_percent(top1, count)})"
        )
    elif validated:
        shown["accuracy"] = f"{100 * max(validated):.1f} % of the validation images, at its best"
    elif (folds := model_file.with_name(CROSS_VALIDATION_FILE)).is_file():
        with suppress(ValueError, KeyError, TypeError):
            found = read_json(folds)
            count = found["num_images"]
            interval = format_interval(found["interval"], count)
            shown["accuracy"] = (
                f"{format_percent(found['top1'], count)} ({interval} with 95 % confidence) of"
                f" {count:,} images in cross-validation"
            )
    return shown


def _describe_answers(bundle: "Bundle") -> dict[str, object]:
    """Describe temperature, prediction sets and features."""
    from vit.prediction.decision import describe_decision

    shown: dict[str, object] = {}
    conformal = bundle.metadata.get("conformal") or {}
    if bundle.likeness is not None:
        features = bundle.likeness.training_features
        names = "with" if conformal.get("training_images") else "without"
        shown["training features"] = (
            f"{len(features):,} of {features.shape[1]} values, {features.nbytes / 1000:,.1f} kB,"
            f" {names} the names of their images"
        )
    elif conformal.get("no_likeness"):
        shown["training features"] = f"none: {conformal['no_likeness']}"
    if "temperature" in bundle.metadata:
        fitted_on = bundle.metadata.get("temperature_fitted_on", {})
        images = "".join(f", {key} {_describe_value(value)}" for key, value in fitted_on.items())
        shown["temperature"] = f"{bundle.temperature:.4f}{images}"
    if decision := describe_decision(bundle):
        shown["decision"] = decision
    return shown


def _describe_value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "– (the file has no finite number here)"
    return value
