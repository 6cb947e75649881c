"""`vit info`: what this machine will use, or what a model file holds."""

from pathlib import Path
from typing import Annotated

import typer


def info(
    model: Annotated[str | None, typer.Argument(help="model.safetensors, a training directory or timm:NAME")] = None,
) -> None:
    """Versions, device, threads and precision; or a model's architecture, classes, preprocessing and data."""
    from rich.console import Console

    from vit.cli.common import build_facts_table

    facts = _describe_model(model) if model else _describe_machine()
    Console(highlight=False).print(build_facts_table(facts))


def _describe_machine() -> dict[str, object]:
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
    from vit.bundle import describe, load_bundle

    facts = describe(load_bundle(source))
    names = facts["classes"]
    sections = {
        f"{section}.{key}": value
        for section in ("architecture", "preprocess", "data", "versions")
        for key, value in (facts[section] or {}).items()
    }
    return {
        "model": str(Path(source)),
        "parameters": f"{facts['parameters']:,}",
        "classes": ", ".join(names[:10]) + (f", … ({len(names)})" if len(names) > 10 else ""),
        **sections,
        "sha256": facts["sha256"],
    }
