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
    num_parameters = sum(parameter.numel() for parameter in bundle.model.parameters())
    noun = "labels" if bundle.is_multilabel else "classes"
    facts: dict[str, object] = {
        "model": f"{source}: {type(bundle.model).__name__}",
        "parameters": f"{num_parameters:,}",
        noun: f"{len(bundle.class_names)}: {shorten(', '.join(bundle.class_names))}",
        "sha256": bundle.sha256,
        "preprocess": json.dumps(bundle.preprocess.to_dict()),
    }
    for name, values in bundle.metadata.items():
        if name != "class_names" and values not in (None, {}, []):
            # the values of all keys of a section, on one line
            text = values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
            facts[name] = shorten(text, 400)
    return facts
