"""What a user calls from Python: `vit.train(…)`, `vit.evaluate(…)` and so on.

Each function makes an options record (`vit.options`) of its arguments, as the commands do of theirs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vit.analysis.audit.run import audit as audit
from vit.analysis.class_summary.summarize import summarize_classes as summarize_classes
from vit.analysis.compare.comparison import compare as compare
from vit.analysis.faithfulness.measure import measure_faithfulness as measure_faithfulness
from vit.bundle import Bundle, ModelLike, keeps_mode, open_model
from vit.data.listing import ImageInputs, list_images
from vit.data.sources.registry import register_source as register_source
from vit.data.sources.source import Source as Source
from vit.evaluation.evaluate import evaluate as evaluate
from vit.explanation.best_method import choose_methods
from vit.explanation.explainer import Explainer
from vit.explanation.explanation_files import write_explanations
from vit.explanation.items import find_items
from vit.explanation.records import Explanations
from vit.explanation.writer import MapWriter
from vit.options import (
    ExplainOptions,
    MapOptions,
    TargetLike,
    pick,
)
from vit.prediction.embed import embed as embed
from vit.prediction.predict import predict as predict
from vit.runtime.arguments import as_tuple
from vit.runtime.files import prepare_output
from vit.training.train_model import train as train

if TYPE_CHECKING:
    from vit.bundle import Bundle as Bundle
    from vit.bundle import load_bundle as load_bundle
    from vit.deploy.export.export_model import export_model as export_model
    from vit.explanation.capture.forward import capture_attention as capture_attention
    from vit.explanation.methods.rollout import attention_rollout as attention_rollout
    from vit.explanation.render.overlay import save_overlay as save_overlay
    from vit.explanation.targets import CosineTarget as CosineTarget
    from vit.model.timm_weights import load_timm as load_timm
    from vit.model.vision_transformer import VisionTransformer as VisionTransformer
    from vit.training.observers import Observer as Observer

# more images are explained without sanity checks, which take longer than the maps
_MAX_CHECKED_IMAGES = 64


@keeps_mode
@torch.inference_mode(False)  # a model that is loaded in it could not be differentiated
def explain(
    model: ModelLike,
    images: ImageInputs | None = None,
    *,
    methods: str | Sequence[str] = ("auto",),
    target: TargetLike = "auto",
    map_options: MapOptions | None = None,
    scale: str = "image",
    interpolation: str = "smooth",
    sanity_checks: bool | None = None,
    count: int = 16,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "float32",
    random_weights: bool = False,
    output: str | Path | None = None,
    formats: str | Sequence[str] = ("png", "npz"),
    max_side: int = 512,
    resume: bool = False,
    overwrite: bool = False,
) -> Explanations:
    """Compute attention maps: which parts of an image the model's answer came from.

    Args:
        model: as of `vit.evaluate`.
        images: as of `vit.predict`. None: `count` images of the test split of the data that the
            model was trained on.
        methods: names of methods (`vit explain --help` lists them); "best" is the one that
            `vit.measure_faithfulness` found; "auto" is rollout and, of up to 64 images, the best
            where it is known, else libra-removal; of a model without attention (ResNet, ConvNeXt,
            Swin) grad-cam and input-x-gradient.
        target: what to explain: a class's name or index, "auto" for the predicted one, "all", or
            "top3"; "A - B" for the difference of two classes' logits; "sigmoid:A" for a label that
            others don't exclude; or a function from the model's outputs [B, C] to a number of each
            image [B], such as `lambda logits: logits[:, 3] - logits[:, 5]` or
            `vit.CosineTarget(embedding)`. Of a model with one output "auto" is that number.
        map_options: of the methods, such as `vit.options.MapOptions(head_fusion="max")`. None: their
            defaults.
        scale: what the strongest colour of the overlays stands for: the largest value of the
            "image" or of the "batch", or a "fixed" one.
        interpolation: "smooth", or "patches": each patch in one colour, with its edges.
        sanity_checks: check every map. None: of up to 64 images.
        count: images, where `images` is None.
        batch_size: images at a time. None: 64 for images of up to 64 pixels a side, else 16.
        device: as of `vit.evaluate`.
        precision: of the forward pass, as of `vit.evaluate`; maps are float32.
        random_weights: explain the same model untrained, a sanity check.
        output: a directory in which each batch is written as soon as it is explained. None:
            nothing is written.
        formats: of the files in `output`: "png" (or "jpeg" or "webp"), "npz", "html".
        max_side: of a photo in the overlays, pixels; 0 for no limit.
        resume: continue an export into `output`; only the images that it lacks are in the result.
        overwrite: replace an earlier export in `output`.

    Returns:
        The result: `.maps[method]` is a tensor [images, rows, columns] on the patch grid, or
        [images, classes, rows, columns] of several targets;
        `.sanity_checks[method]` says whether each map agrees with what leaving patches out
        does. A notebook shows the first images with their maps; `.show()` opens them as a picture.

    Raises:
        ValueError: an unknown method, option, format or class, or no image that can be read.
        FileExistsError: `output` holds files, and neither `resume` nor `overwrite` is set.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods=("rollout", "gae"))
        >>> result.maps["rollout"].shape  # [1, rows, columns]
    """
    if max_side < 0:
        raise ValueError(f"max_side {max_side} is negative; 0 means no limit")
    bundle = open_model(model, device=device, random_weights=random_weights)
    # listed once: a folder of many images takes a while
    inputs = None
    num_images = count
    if images is not None:
        inputs = list(list_images(images))
        num_images = len(inputs)

    if sanity_checks is None:
        sanity_checks = num_images <= _MAX_CHECKED_IMAGES
    methods = choose_methods(as_tuple(methods), bundle, num_images=num_images)
    formats = as_tuple(formats)
    map_options = map_options or MapOptions()
    options = pick(ExplainOptions, locals())
    # whatever is wrong with the options is said before an earlier result is replaced
    explainer = Explainer(bundle, options)
    map_writer = None
    # of an interrupted export, what is written is left out
    written: Mapping[str, str] = {}
    if output is not None:
        map_writer = MapWriter(output, bundle, options)
        written = map_writer.names
    items = find_items(
        inputs,
        trained_on=bundle.config.get("data", {}),
        count=count,
        written=written,
        passed_images=bundle.passed_images,
    )
    if map_writer is None:
        return explainer.explain(items)
    if not resume:
        prepare_output(map_writer.output, overwrite=overwrite)
    return write_explanations(explainer, items, map_writer)
