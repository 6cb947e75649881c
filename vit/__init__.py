"""Train vision transformers on your own images, evaluate them and explain them with attention maps.

Importing this package loads nothing heavy: torch comes in with the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vit.runtime.version import __version__

if TYPE_CHECKING:
    from vit.api import (
        audit,
        compare,
        embed,
        evaluate,
        explain,
        measure_faithfulness,
        predict,
        summarize_classes,
        train,
    )
    from vit.bundle import Bundle, load_bundle
    from vit.deploy.export.run import export_model
    from vit.explanation.capture.forward import capture_attention
    from vit.explanation.explainer import explain_images
    from vit.explanation.methods.rollout import attention_rollout
    from vit.explanation.render.overlay import save_overlay
    from vit.explanation.targets import CosineTarget
    from vit.model.timm_weights import load_timm
    from vit.model.vision_transformer import VisionTransformer
    from vit.training.observers import Observer

_NAMES = {
    "vit.api": (
        "audit",
        "compare",
        "embed",
        "evaluate",
        "explain",
        "measure_faithfulness",
        "predict",
        "summarize_classes",
        "train",
    ),
    "vit.deploy.export.run": ("export_model",),
    "vit.bundle": ("Bundle", "load_bundle"),
    "vit.explanation.capture.forward": ("capture_attention",),
    "vit.explanation.explainer": ("explain_images",),
    "vit.explanation.methods.rollout": ("attention_rollout",),
    "vit.explanation.targets": ("CosineTarget",),
    "vit.explanation.render.overlay": ("save_overlay",),
    "vit.model.timm_weights": ("load_timm",),
    "vit.model.vision_transformer": ("VisionTransformer",),
    "vit.training.observers": ("Observer",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Bundle",
    "CosineTarget",
    "Observer",
    "VisionTransformer",
    "__version__",
    "attention_rollout",
    "audit",
    "capture_attention",
    "compare",
    "embed",
    "evaluate",
    "explain",
    "explain_images",
    "export_model",
    "load_bundle",
    "load_timm",
    "measure_faithfulness",
    "predict",
    "save_overlay",
    "summarize_classes",
    "train",
]


def __getattr__(name: str) -> Any:
    """Find a public name in its module on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(
            f"module 'vit' has no attribute {name!r}; it has {', '.join(sorted(_MODULES))}"
        )
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
