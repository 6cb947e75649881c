"""What a user calls from Python: `vit.train(…)`, `vit.evaluate(…)` and so on.

Each function makes an options record (`vit.options`) of its arguments, as the commands do of theirs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vit.analysis.audit.run import audit as audit
from vit.analysis.class_summary.summarize import summarize_classes as summarize_classes
from vit.analysis.compare.comparison import compare as compare
from vit.analysis.faithfulness.measure import measure_faithfulness as measure_faithfulness
from vit.bundle import Bundle, ModelLike, keeps_mode, open_model
from vit.data.listing import ImageInputs, list_images
from vit.data.sources.registry import register_source as register_source
from vit.data.sources.source import Source as Source
from vit.data.transforms import Transform
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
    TrainOptions,
    pick,
)
from vit.prediction.embed import embed as embed
from vit.prediction.predict import predict as predict
from vit.runtime.arguments import as_tuple, check_kind
from vit.runtime.files import expand_home, prepare_output
from vit.training.observers import Observer
from vit.training.recipe import ConfigLike
from vit.training.result import TrainingResult

if TYPE_CHECKING:
    from vit.bundle import Bundle as Bundle
    from vit.bundle import load_bundle as load_bundle
    from vit.deploy.export.run import export_model as export_model
    from vit.explanation.capture.forward import capture_attention as capture_attention
    from vit.explanation.methods.rollout import attention_rollout as attention_rollout
    from vit.explanation.render.overlay import save_overlay as save_overlay
    from vit.explanation.targets import CosineTarget as CosineTarget
    from vit.model.timm_weights import load_timm as load_timm
    from vit.model.vision_transformer import VisionTransformer as VisionTransformer
    from vit.training.observers import Observer as Observer

# more images are explained without sanity checks, which take longer than the maps
_MAX_CHECKED_IMAGES = 64


def train(
    config: ConfigLike | None = None,
    *,
    output: str | Path,
    overrides: Sequence[str] = (),
    init: str | Path | None = None,
    minutes: float | None = None,
    group_by: str | int | None = None,
    folds: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    transform: Transform | None = None,
    dataset: Any = None,
    class_names: Sequence[str] | None = None,
    model: nn.Module | None = None,
    callbacks: Sequence[Observer] = (),
) -> TrainingResult:
    """Train a model and keep the run in a directory.

    Args:
        config: a YAML file, the name of a packaged recipe ("cifar10/cpu"), a dictionary of sections
            or a `vit.config.Config`. Or images: a folder, table, shards or the name of a data set,
            for which a configuration is chosen. None with `resume`: the run's own.
        output: the run's directory.
        overrides: changes of the configuration, such as ["train.epochs=20", "train.seed=1",
            "train.device=cpu"]; `vit.config.Config` and docs/configuration.md list the keys.
        init: weights to start from: "timm:NAME", a folder of timm or Hugging Face, a file of
            weights, a model file, a run directory or a checkpoint in one. None: random ones, or
            those of `model.init`.
        minutes: of training, where `config` names images. None: 5 on a CPU, 20 on a GPU.
        group_by: what images have in common that stay in one split (one animal, site, patient):
            1 for the folder that they are in, 2 for the one above it, or a regular expression on
            the path with one group. None: the column "group" of a table, if it has one.
        folds: with `init`: the model is a linear probe of all images, none held out, and each is
            predicted by a probe of the other folds, which has seen neither it nor its group; the
            result is in `cross_validation.json`. None: images are held out.
        resume: continue the run in `output` from its last checkpoint, if there is one. `transform`,
            `dataset`, `model` and `callbacks` are passed again.
        overwrite: replace the run in `output`.
        dry_run: print the plan, write a picture of one batch, `dry_run.png`, and stop.
        transform: called on every training image, uint8 [H, W, 3], before the augmentation of the
            configuration; of albumentations, torchvision, or any function.
        dataset: images in place of those of the configuration: a map-style data set of torch with
            items (image, label), a pair of them (training, validation), or a pair of arrays
            (images, labels [n]). An image is a PIL image, a uint8 array [H, W, 3], or a tensor
            [3, H, W] of uint8 or of values from 0 to 1; a label is an integer or a class name.
        class_names: of `dataset`, in the order of the labels. None: its attribute `classes`, the
            labels where they are names, or "class 0" and so on.
        model: a module from images [B, 3, H, W] to logits [B, C], which is trained itself. None: a
            vision transformer as the configuration has it.
        callbacks: objects of `vit.Observer`, whose methods are called after each step and epoch;
            one that returns True saves the state and ends the run.

    Returns:
        The run: `.bundle` is its best model, `.metrics` has a dictionary an epoch.

    Raises:
        ValueError: a wrong configuration, or arguments that don't fit together.
        FileExistsError: `output` holds another run.
        vit.training.signals.TrainingInterrupted: after SIGINT or SIGTERM, with the state saved.
        vit.runtime.processes.ProcessLostError: another process of the job ended or hangs.

    Example:
        >>> run = vit.train("photos", output="runs/photos", minutes=5)  # photos/<class>/*.jpg
        >>> vit.predict(run.bundle, "photo.jpg").predictions[0].classes
    """
    # timm and more, which other functions don't need
    from vit.training.train_model import train_model
    from vit.training.user_objects import UserObjects

    options = pick(TrainOptions, locals())
    check_kind(output, (str, Path), name="output", expected="the path of a directory")
    expected = 'a list of texts, such as ["train.epochs=20"]'
    check_kind(overrides, (list, tuple), name="overrides", expected=expected)
    # what no configuration file can hold
    objects = UserObjects(
        transform=transform,
        dataset=dataset,
        class_names=class_names,
        model=model,
        callbacks=callbacks,
    )
    return train_model(config, overrides, expand_home(output), options, objects)


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
