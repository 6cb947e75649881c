"""The public function `vit.explain`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vit.bundle import Models, keeps_mode, open_model
from vit.data.images import ImageInputs, list_images
from vit.data.preprocess import Preprocess
from vit.explanation.explainer import Explainer
from vit.explanation.items import find_items
from vit.explanation.methods.auto import MAX_CHECKED_IMAGES, choose_methods
from vit.explanation.records import Explanations
from vit.explanation.render.page import name_model
from vit.explanation.targets import TargetLike, check_count, describe_target
from vit.explanation.writer import MapWriter
from vit.runtime.arguments import accept_old_names, as_tuple, check_arguments


@keeps_mode
@torch.inference_mode(False)  # a model that is loaded in it can't be differentiated
@accept_old_names(count="num_images")
@check_arguments(num_images=(1, None), batch_size=(1, None))
def explain(
    model: Models,
    images: ImageInputs | None = None,
    *,
    methods: str | Sequence[str] = "auto",
    target: TargetLike = "auto",
    map_options: Mapping[str, object] | None = None,
    checks: bool | None = None,
    num_images: int = 16,
    batch_size: int | None = None,
    device: str = "auto",
    class_names: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    output: str | Path | None = None,
    formats: str | Sequence[str] = ("png", "npz"),
    overwrite: bool = False,
) -> Explanations:
    """Compute attention maps: which parts of an image explain the prediction.

    Args:
        model: See `vit.evaluate`.
        images: Paths, folders, PIL images, uint8 arrays [H, W, 3], or one of
            them. None: `num_images` images of the model's test split.
        methods: Names of methods. "auto" is, for up to 64 images, libra-removal
            and rollout; for more, rollout alone. For a model without attention
            (ResNet, ConvNeXt, Swin), "auto" is grad-cam and
            libra-input-x-gradient.
        target: Class to explain: a name, an index, "auto" (the predicted one,
            or every predicted label), "all" or "top3"; also "A - B", the
            difference of two classes' logits. An index is an integer, or a text
            where no class is called by a number. A function from outputs [B, C]
            to numbers [B] is explained itself, such as
            `lambda logits: logits[:, 3]` or `vit.CosineTarget(embedding)`. For
            a model with one output, "auto" is this output. A list or a tensor
            has a target for each image.
        map_options: Options of the methods, such as {"head_fusion": "max"}.
            None: their defaults.
        checks: Test every map: are its patches important for the prediction?
            None: for up to 64 images.
        num_images: Number of images if no `images` are given.
        batch_size: Images at a time. None: 64 for images of up to 64 pixels a
            side, otherwise 16.
        device: See `vit.evaluate`.
        class_names: Name of each class, for a module. None: the model's own.
        preprocess: Preprocessing of images, for a module. None: the model's
            own, else ImageNet's.
        output: Directory for the results. None: nothing is written.
        formats: Files in `output`: "png", "svg" and "pdf" (figures for papers),
            "npz", "html".
        overwrite: Replace an earlier result.

    Returns:
        The result: `.maps[method]` is a tensor [images, rows, columns] on the
        patch grid, or [images, classes, rows, columns] for several classes;
        `.checks[method]` has the patch-removal test of each map. A
        notebook shows the first images with their maps, and so does `.show()`,
        elsewhere in the system's image viewer.

    Raises:
        ValueError: A method, option, format or class is unknown, or no image
            can be read.
        FileExistsError: `output` contains files, and `overwrite` isn't set.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods="gae")
        >>> result.maps["gae"].shape  # [1, rows, columns]
    """
    bundle = open_model(model, device=device, class_names=class_names, preprocess=preprocess)
    # listed once, because listing many images takes a while
    inputs = None if images is None else list(list_images(images))
    expected = num_images if inputs is None else len(inputs)
    check_count(target, expected)
    # everything that can be wrong with the options is checked before an earlier result is replaced
    explainer = Explainer(
        bundle,
        choose_methods(as_tuple(methods), bundle, num_images=expected),
        target=target,
        map_options=map_options,
        sanity_checks=expected <= MAX_CHECKED_IMAGES if checks is None else checks,
        batch_size=batch_size,
    )
    items = find_items(
        inputs,
        recorded=bundle.recorded_images,
        count=num_images,
        passed_images=bundle.passed_images,
    )
    if output is None:
        return explainer.explain(items)

    writer = MapWriter(
        output,
        bundle,
        describe_parameters(explainer, target),
        formats=as_tuple(formats),
        overwrite=overwrite,
    )
    gallery = None
    observers = [writer.add]
    if "html" in as_tuple(formats):
        from vit.explanation.gallery.gallery import Gallery

        gallery = Gallery(bundle)
        observers.append(gallery.add)
    explanations = explainer.explain(
        items, *observers, needs_attention=lambda: gallery is not None and not gallery.is_full
    )
    writer.finish(explanations.unreadable)
    if gallery is not None:
        title = f"Attention maps of {name_model(bundle.name)}"
        gallery.write(writer.output / "gallery.html", title=title)
    return explanations


def describe_parameters(explainer: Explainer, target: TargetLike) -> dict[str, Any]:
    """Return what the maps depend on, for the manifest."""
    return {
        **explainer.map_options,
        "methods": list(explainer.methods),
        "target": describe_target(target),
        "checks": explainer.sanity_checks,
        "batch_size": explainer.batch_size,
    }
