"""`vit info`: what this machine will use, or what a model file holds."""

from vit.runtime.command import Command
from vit.runtime.console import echo


def info(model: str | None = None) -> None:
    """Show what this machine will use, or what a model file holds.

    Args:
        model: See `vit.evaluate`.
    """
    # `vit --help` does without
    import yaml

    facts = _describe_model(model) if model else _describe_machine()
    echo(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).rstrip())


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
        # without the names of images
        "data": {name: fact for name, fact in bundle.data.items() if name != "held_out"},
        "class_names": list(bundle.class_names),
        "preprocess": bundle.preprocess.to_dict(),
    }
    # it lists the training images
    facts.pop("conformal", None)
    return {name: value for name, value in facts.items() if value}
