"""The public function `vit.explain`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vit.bundle import ModelLike, keeps_mode, open_model
from vit.data.images import ImageInputs, list_images
from vit.data.preprocess import Preprocess
from vit.explanation.explainer import Explainer
from vit.explanation.items import ImageItem, find_items
from vit.explanation.methods.auto import MAX_CHECKED_IMAGES, choose_methods
from vit.explanation.methods.registry import describe_options
from vit.explanation.records import Explanations, ImageResult
from vit.explanation.render.overlay import INTERPOLATIONS
from vit.explanation.render.page import name_model
from vit.explanation.render.scale import SCALES
from vit.explanation.targets import TargetLike, check_count, describe_target
from vit.explanation.writer import MapWriter
from vit.runtime.arguments import accept_old_names, as_tuple, check_arguments, check_choice
from vit.runtime.files import prepare_output

if TYPE_CHECKING:
    from vit.explanation.gallery.gallery import Gallery


@keeps_mode
@torch.inference_mode(False)  # a model that is loaded in it can't be differentiated
@accept_old_names(count="num_images")
@check_arguments(num_images=(1, None), batch_size=(1, None), max_side=(0, None), dpi=(1, None))
def explain(
    model: ModelLike,
    images: ImageInputs | None = None,
    *,
    methods: str | Sequence[str] = "auto",
    target: TargetLike = "auto",
    map_options: Mapping[str, object] | None = None,
    scale: str = "image",
    interpolation: str = "smooth",
    checks: bool | None = None,
    num_images: int = 16,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "float32",
    random_weights: bool = False,
    class_names: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    output: str | Path | None = None,
    formats: str | Sequence[str] = ("png", "npz"),
    max_side: int = 512,
    dpi: int = 300,
    captions: bool = True,
    resume: bool = False,
    overwrite: bool = False,
) -> Explanations:
    """Compute attention maps: which parts of an image explain the prediction.

    Args:
        model: See `vit.evaluate`.
        images: Paths, folders, PIL images, uint8 arrays [H, W, 3], or one of
            them. None: `num_images` images of the model's test split.
        methods: Names of methods. "auto" is libra-removal and rollout for up
            to 64 images, and rollout alone for more. For a model without attention (ResNet, ConvNeXt, Swin),
            "auto" is grad-cam and input-x-gradient.
        target: Class to explain: a name, an index, "auto" (the predicted one,
            or every predicted label), "all" or "top3"; also "A - B" and
            "sigmoid:A". An index is an integer, or a text where no class is
            called by a number. "A - B" is the difference of two classes'
            logits; "sigmoid:A" is one label of a multi-label model. A function
            from outputs [B, C] to numbers [B] is explained itself, such as
            `lambda logits: logits[:, 3]` or `vit.CosineTarget(embedding)`. For
            a model with one output, "auto" is this output. A list or a tensor
            has a target for each image.
        map_options: Options of the methods, such as {"head_fusion": "max"}.
            None: their defaults.
        scale: Scale of the colours: "image", "batch" or "fixed". The strongest
            colour is the largest value of the image, of the batch, or 4 times
            the average patch.
        interpolation: "smooth", or "patches" for one colour in each patch.
        checks: Test every map: are its patches important for the prediction?
            None: for up to 64 images.
        num_images: Number of images if no `images` are given.
        batch_size: Images at a time. None: 64 for images of up to 64 pixels a
            side, otherwise 16.
        device: See `vit.evaluate`.
        precision: Precision of the forward pass, see `vit.evaluate`. Maps are
            float32.
        random_weights: Explain the same model with random weights, as a sanity
            check.
        class_names: Name of each class, for a module. None: the model's own.
        preprocess: Preprocessing of images, for a module. None: the model's
            own, else ImageNet's.
        output: Directory for the results. Each batch is written as soon as it
            is explained. None: nothing is written.
        formats: Files in `output`: "png" (or "jpeg" or "webp"), "svg" and
            "pdf" (figures for papers), "npz", "html".
        max_side: Largest side of a photo in pictures and figures, in pixels; 0
            for no limit.
        dpi: Pixels of the photo in each inch of an svg or pdf figure.
        captions: Text below the pictures. Without it the colours of a png have
            a file of their own.
        resume: Continue an export: skip the images of the manifest. Only the
            other images are in the result.
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
        FileExistsError: `output` contains files, and neither `resume` nor
            `overwrite` is set.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods="gae")
        >>> result.maps["gae"].shape  # [1, rows, columns]
    """
    check_choice(scale, SCALES, name="scale")
    check_choice(interpolation, INTERPOLATIONS, name="interpolation")
    bundle = open_model(
        model,
        device=device,
        random_weights=random_weights,
        class_names=class_names,
        preprocess=preprocess,
    )
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
        precision=precision,
    )
    smooth = interpolation == "smooth"
    map_writer = None
    if output is not None:
        parameters = {
            **describe_parameters(explainer, target, scale, interpolation),
            "batch_size": batch_size,
            "precision": precision,
        }
        map_writer = MapWriter(
            output,
            bundle,
            parameters,
            formats=as_tuple(formats),
            smooth=smooth,
            max_side=max_side,
            dpi=dpi,
            captions=captions,
            resume=resume,
        )
    items = find_items(
        inputs,
        recorded=bundle.recorded_images,
        count=num_images,
        # the images that an interrupted export has written
        written=map_writer.names if map_writer else {},
        passed_images=bundle.passed_images,
    )
    if map_writer is None:
        explanations = explainer.explain(items, scale=scale)
    else:
        # not before everything was checked
        if not resume:
            prepare_output(map_writer.output, overwrite=overwrite)
        gallery = None
        if "html" in as_tuple(formats):
            gallery = _build_gallery(explainer, num_images=len(items), smooth=smooth)
        explanations = _write(explainer, items, map_writer, gallery, scale=scale)
    # for pictures that a notebook draws later
    explanations.smooth = smooth
    return explanations


def describe_parameters(
    explainer: Explainer, target: TargetLike, scale: str, interpolation: str
) -> dict[str, Any]:
    """Return the parameters of maps and their colours, for the manifest."""
    return {
        **describe_options(explainer.map_options),
        "methods": list(explainer.methods),
        "target": describe_target(target),
        "scale": scale,
        "interpolation": interpolation,
        "sanity_checks": explainer.sanity_checks,
    }


def _build_gallery(explainer: Explainer, *, num_images: int, smooth: bool) -> "Gallery":
    from vit.explanation.gallery.gallery import Gallery  # with scipy, takes a third of a second

    return Gallery(explainer.bundle, num_images=num_images, smooth=smooth)


def _write(
    explainer: Explainer,
    items: Sequence[ImageItem],
    map_writer: MapWriter,
    gallery: "Gallery | None",
    *,
    scale: str,
) -> Explanations:
    """Explain images and write each batch as soon as it is explained. Raise ValueError if no image
    can be read."""
    observers: list[Callable[[Sequence[ImageResult]], object]] = [map_writer.add]
    if gallery is not None:
        observers.append(gallery.add)
    # closing it writes the manifest, also after an interruption
    with map_writer:
        explanations = explainer.explain(
            items,
            *observers,
            scale=scale,
            token_bytes=lambda: gallery.token_bytes if gallery is not None else 0,
        )
        map_writer.unreadable = explanations.unreadable
    if not map_writer.entries:
        reason = explanations.unreadable[0][1]
        raise ValueError(f"none of the {len(items)} images could be read; {reason}")
    if gallery is not None:
        title = f"Attention maps of {name_model(explainer.bundle.name)}"
        gallery.write(map_writer.output / "gallery.html", title=title)
    return explanations
