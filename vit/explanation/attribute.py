"""The public function `vit.attribute`: from a batch of tensors to its maps, without files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.bundle import ModelLike, keeps_mode, open_model
from vit.explanation.capture.reader import read_model
from vit.explanation.explainer import choose_explain_batch_size
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import find_methods
from vit.explanation.targets import CLASS, TargetLike, build_target, find_output_kind
from vit.model.logits import compute_logits
from vit.model.model_info import count_classes, find_class_names, keep_mode
from vit.runtime.device import run_in_memory
from vit.runtime.tensors import Images


@keeps_mode
def attribute(
    model: ModelLike,
    images: Images,
    *,
    method: str = "libra-removal",
    target: TargetLike = "auto",
    map_options: Mapping[str, object] | None = None,
    class_names: Sequence[str] | None = None,
) -> Float[Tensor, "B rows columns"]:
    """Compute the maps of normalised images that are tensors, for example in a
    training loop.

    Args:
        model: See `vit.evaluate`. Maps of a module in training mode are those
            of evaluation mode; its mode comes back.
        images: Normalised images [B, C, H, W], on the model's device.
        method: Name of a method of `vit.explain`.
        target: See `vit.explain`. A list or a tensor [B] has a class for each
            image. For several labels, "auto" is the most probable one.
        map_options: See `vit.explain`.
        class_names: Name of each class, for a module. None: the model's own, or
            "class 0" and so on.

    Returns:
        The maps [B, rows, columns] on the device of the images, without a
        graph.

    Raises:
        ValueError: The images aren't normalised tensors of finite values on the
            model's device, the model can't be read, or an option is unknown.

    Example:
        >>> maps = vit.attribute(model, images, target=labels)
        >>> maps.shape  # [B, rows, columns]
    """
    is_multilabel = False
    if not isinstance(model, nn.Module):
        device = str(images.device) if isinstance(model, str | Path) else "auto"
        bundle = open_model(model, device=device, class_names=class_names)
        model, class_names = bundle.model, bundle.class_names
        is_multilabel = bundle.is_multilabel
    _check_images(images, model)
    reader = read_model(model, images)
    (chosen,) = find_methods([method])
    built = CLASS
    # a map that is the same for every class needs none
    if chosen.class_specific or not isinstance(target, str) or target != "auto":
        names = class_names or _name_outputs(reader.model, images)
        kind = find_output_kind(reader.model, names, is_multilabel=is_multilabel)
        built = build_target(target, names, kind, num_images=len(images))
    parts = []

    def explain_part(first: int, end: int) -> None:
        _, _, (maps,) = compute_maps(
            reader,
            images[first:end],
            methods=[method],
            target=built.select(range(first, end)),
            options=map_options,
        )
        parts.append(maps)

    height, width = images.shape[-2:]
    part_size = choose_explain_batch_size((height, width), images.device)
    run_in_memory(explain_part, 0, len(images), part_size=part_size, device=images.device)
    return torch.cat(parts).squeeze(1)


def _name_outputs(model: nn.Module, images: Images) -> tuple[str, ...]:
    """Return the names of a model's classes, by default "class 0" and so on; none without a
    classifier."""
    if count_classes(model) is not None:
        return find_class_names(model)
    # it doesn't tell their number
    with keep_mode(model), torch.no_grad():
        logits = compute_logits(model.eval(), images[:1])
    return tuple(f"class {index}" for index in range(logits.shape[1]))


def _check_images(images: Images, model: nn.Module) -> None:
    """Raise ValueError unless a model can take the images."""
    device = next(model.parameters()).device
    is_batch = images.ndim == 4 and len(images) and images.is_floating_point()
    if not is_batch or images.device != device or not images.isfinite().all():
        raise ValueError(
            "images are a normalised tensor [B, C, H, W] of finite floating-point values on the "
            f"model's device, {device}, not {images.dtype} {list(images.shape)} on "
            f"{images.device}; vit.explain takes photos"
        )
