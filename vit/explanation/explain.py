"""The public function `vit.explain`."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from vit.bundle import Bundle, Models, keeps_mode, open_model
from vit.data.images import ImageInputs
from vit.data.preprocess import Preprocess
from vit.explanation.capture.forward import open_reader
from vit.explanation.capture.tokens import draw_noise
from vit.explanation.explainer import Explainer
from vit.explanation.gallery.gallery import MAX_IMAGES, describe_card
from vit.explanation.items import find_items
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import list_methods
from vit.explanation.records import MAX_SHEET_IMAGES, Explanations
from vit.explanation.targets import TargetLike, describe_target
from vit.explanation.writer import FORMATS, write_pictures, write_results
from vit.runtime.arguments import as_tuple, check_choice, check_minimum
from vit.runtime.files import check_output, expand_home, open_output

# images whose maps are tested by default; a test takes five times as long as the maps of a ViT-S/16
_NUM_TESTED = 16


@keeps_mode
@torch.inference_mode(False)  # a model that is loaded in it can't be differentiated
def explain(
    model: Models,
    images: ImageInputs | None = None,
    *,
    methods: str | Sequence[str] = "auto",
    target: TargetLike = "auto",
    map_options: Mapping[str, object] | None = None,
    checks: bool | None = None,
    num_images: int | None = None,
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
        methods: Names of methods. "auto" is libra-removal and rollout; for a
            model without attention (ResNet, ConvNeXt, Swin), grad-cam. For
            thousands of images, rollout alone takes a quarter of the time.
        target: Class to explain: a name, an index, or "auto" (the predicted
            one, every predicted label, or a model's only output). "A - B" is
            the difference of two classes' logits. A function from outputs
            [B, C] to numbers [B] is explained itself, such as
            `lambda logits: logits[:, 3]`. A list or a tensor has a class for
            each image.
        map_options: Options of the methods, such as {"head_fusion": "max"}.
            None: their defaults.
        checks: Test every map: are its patches important for the prediction?
            None: the maps of the first 16 images.
        num_images: Images of the model's test split. None: 16.
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
        patch grid, or [images, labels, rows, columns] for several labels;
        `.checks[method]` has the patch-removal test of each map, and
        `.draw_sheet()` draws the first images with their maps.

    Raises:
        ValueError: A method, option, format or class is unknown, or no image
            can be read.
        FileExistsError: `output` contains files, and `overwrite` isn't set.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods="gae")
        >>> result.maps["gae"].shape  # [1, rows, columns]
    """
    check_minimum(1, num_images=num_images, batch_size=batch_size)
    bundle = open_model(model, device=device, class_names=class_names, preprocess=preprocess)
    items = find_items(bundle, images, num_images)
    names, kinds = as_tuple(methods), as_tuple(formats)
    if names == ("auto",):
        names = _choose_auto(bundle)
    # everything that can be wrong with the options is checked before an earlier result is replaced
    explainer = Explainer(
        bundle,
        items,
        names,
        target=target,
        map_options=map_options,
        num_tested={None: _NUM_TESTED, True: len(items), False: 0}[checks],
        num_attended=MAX_IMAGES * (output is not None and "html" in kinds),
        batch_size=batch_size or 0,
    )
    folder = None if output is None else expand_home(output)
    if folder is not None:
        for name in kinds:
            check_choice(name, FORMATS, name="--format")
        check_output(folder, overwrite=overwrite, sources=(bundle.name,))
    found = Explanations(bundle, names, images=[], unreadable=explainer.unreadable)
    cards: list[dict[str, Any]] = []  # images of the gallery
    for batch in explainer:
        if folder is not None:
            if not found.images:
                # not earlier, so that a command that can read no image leaves nothing
                open_output(folder, overwrite=overwrite)
            write_pictures(folder, batch, kinds)
            if "html" in kinds:
                cards += map(describe_card, batch[: MAX_IMAGES - len(cards)])
        for image in batch:
            # pictures of all images may not fit into memory
            image.attention = None
            if len(found.images) >= MAX_SHEET_IMAGES:
                image.photo = None
            found.images.append(image)
    problem = "there are no images to explain"
    if found.unreadable:
        count, (_, reason) = len(found.unreadable), found.unreadable[0]
        problem = f"{count} images can't be read; the first: {reason}"
    if not found.images:
        raise ValueError(problem)
    if folder is not None:
        parameters = {
            "methods": list(names),
            "map_options": dict(map_options or {}),
            "checks": explainer.num_tested,
            "batch_size": explainer.batch_size,
            "target": describe_target(target),
        }
        write_results(folder, found, kinds, parameters=parameters, cards=cards)
    elif found.unreadable:
        warnings.warn(problem, stacklevel=2)
    return found


def _choose_auto(bundle: Bundle) -> tuple[str, ...]:
    """Choose the methods for "auto"."""
    reader = open_reader(bundle)
    if not reader.has_attention:
        return tuple(list_methods(reader.source))
    # a model without a classifier has no evidence for a class
    if bundle.class_names:
        # a pooling may have no gates; it is tried on noise, because all tokens of an even image may
        # count alike
        shape = (1, 3, *bundle.preprocess.image_size)
        noise = draw_noise(shape, next(bundle.model.parameters()))
        with suppress(ValueError):
            compute_maps(reader, noise, methods=["removal-gradient"])
            return ("libra-removal", "rollout")
    return ("rollout",)
