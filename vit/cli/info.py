"""`vit info`: what this machine will use, or what a model file holds."""

import math

from vit.runtime.arguments import shorten
from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table


def info(model: str | None = None) -> None:
    """Show what this machine will use, or what a model file holds.

    Without MODEL: versions, device, threads and precision. With MODEL: its architecture, classes,
    preprocessing, data and accuracy.

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
    from vit.prediction.conformal import describe_limits

    bundle = load_bundle(source)
    num_parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    shown: dict[str, object] = {
        "model": source,
        "parameters": f"{num_parameters:,}",
        "classes": shorten(", ".join(bundle.class_names)),
    }
    conformal = bundle.metadata.get("conformal") or {}
    if set_limits := describe_limits(bundle.metadata):
        shown["prediction sets"] = set_limits
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
        shown["temperature"] = f"{bundle.temperature:.4f}"
    if evaluation := bundle.metadata.get("evaluation"):
        interval = f"{evaluation['top1_low']:.1%} to {evaluation['top1_high']:.1%}"
        shown["top-1 accuracy"] = (
            f"{evaluation['top1']:.1%} ({interval}, 95 % confidence interval) of"
            f" {evaluation['num_images']:,} images: {evaluation['images']}"
        )
    if limits := bundle.metadata.get("limits"):
        shown["limits"] = limits
    sections = (
        "temperature_fitted_on",
        "architecture",
        "module",
        "preprocess",
        "data",
        "versions",
    )
    for section in sections:
        for key, value in bundle.metadata.get(section, {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                shown[f"{section}.{key}"] = "– (the file has no finite number here)"
            else:
                shown[f"{section}.{key}"] = value
    shown["sha256"] = bundle.sha256
    return shown
