"""The map methods that "auto" stands for."""

from collections.abc import Sequence

import torch

from vit.bundle import Bundle
from vit.explanation.capture.forward import open_reader
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import list_methods

# name for the methods of the default
AUTO = "auto"
# Images for which "auto" takes two methods and tests every map; for more, that takes too long.
MAX_CHECKED_IMAGES = 64


def choose_methods(methods: Sequence[str], bundle: Bundle, *, num_images: int) -> tuple[str, ...]:
    """Return `methods` with other methods instead of "auto", each once.

    "auto" is libra-removal and rollout, or rollout alone for many images; for a model without
    readable attention it is the first two methods that it has.
    """
    names: list[str] = []
    for method in methods:
        names += _choose_auto(bundle, num_images) if method == AUTO else [method]
    return tuple(dict.fromkeys(names))


def _choose_auto(bundle: Bundle, num_images: int) -> list[str]:
    reader = open_reader(bundle)
    if not reader.has_attention:
        return list_methods(reader)[:2]
    # a model without a classifier has no evidence for a class
    if num_images <= MAX_CHECKED_IMAGES and bundle.class_names and _has_removal_maps(bundle):
        return ["libra-removal", "rollout"]
    return ["rollout"]


def _has_removal_maps(bundle: Bundle) -> bool:
    """Return whether the pooling of the model has gates. This project's has; other models are
    tried."""
    reader = open_reader(bundle)
    if reader.is_ours:
        return True
    # noise, because all tokens of an even image may count alike in any pooling
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 3, *bundle.preprocess.image_size, generator=generator)
    try:
        compute_maps(reader, noise.to(bundle.device), methods=["removal-gradient"])
    except ValueError:
        return False
    return True
