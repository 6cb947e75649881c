"""`vit info`: what this machine will use, or what a model file holds."""

import json

from vit.runtime.arguments import shorten
from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table


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

    from vit.runtime.device import choose_device, choose_precision, describe_device
    from vit.runtime.version import collect_versions

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

    bundle = load_bundle(source)
    facts: dict[str, object] = {
        "model": f"{source}: {type(bundle.model).__name__}",
        "parameters": f"{sum(weight.numel() for weight in bundle.model.parameters()):,}",
        "number of classes": len(bundle.class_names),
        "sha256": bundle.sha256,
        **bundle.metadata,
        "class_names": bundle.class_names,
        "preprocess": bundle.preprocess.to_dict(),
    }
    # the values of all keys of a section, on one line
    return {
        name: shorten(json.dumps(value, ensure_ascii=False).strip('"'), 400)
        for name, value in facts.items()
        if value not in (None, {}, [], ())
    }
