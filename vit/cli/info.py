"""`vit info`: what this machine will use, or what a model file holds."""

from pathlib import Path

from vit.cli.common import OptionalModel, build_console, build_facts_table


def info(model: OptionalModel = None) -> None:
    """Versions, device, threads and precision; or a model's architecture, classes, preprocessing and data."""

    facts = _describe_model(model) if model else _describe_machine()
    build_console().print(build_facts_table(facts))


def _describe_machine() -> dict[str, object]:
    import torch

    from vit.bundle import collect_versions
    from vit.runtime.device import choose_device, choose_precision, describe_device

    device, threads = choose_device("auto"), torch.get_num_threads()
    facts = {"device": describe_device(device), "threads": threads, "precision": choose_precision("auto", device)}
    return {**collect_versions(), **facts}


def _describe_model(source: str) -> dict[str, object]:
    from vit.bundle import describe, load_bundle

    facts = describe(load_bundle(source))
    names = facts["classes"]
    classes = ", ".join(names[:10]) + (f", … ({len(names)})" if len(names) > 10 else "")
    shown = {"model": str(Path(source)), "parameters": f"{facts['parameters']:,}", "classes": classes}
    for section in ("architecture", "module", "preprocess", "data", "versions"):
        shown |= {f"{section}.{key}": value for key, value in (facts[section] or {}).items()}
    return shown | {"sha256": facts["sha256"]}
