"""A configuration for images that come without one. It is chosen from their number and sizes, the
device and the minutes.

`_ROWS` says which recipe is taken when, and why. The recipe's size, batch, length and
regularisation are fitted to the images. What the user sets with `key.path=value` holds, and what
depends on it follows.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vit.config import Config, flatten_config, load_config, read_sections
from vit.data.preprocess import Preprocess
from vit.data.sources.registry import find_kind
from vit.data.statistics import MAX_CUT, Survey, are_grey, survey_images
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import as_pair
from vit.runtime.device import choose_device
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import current_process
from vit.training.data import TrainingData, build_data, build_dataset
from vit.training.model import build_model, load_initial_model, resize_model, set_up_training
from vit.training.probe import (
    build_probed_model,
    find_cached_number,
    fit_to_data,
    is_probe_alone,
    uses_probe,
)
from vit.training.recipe import find_recipe
from vit.training.run import RunParts
from vit.training.timing import measure_forward_rate, measure_training_rate
from vit.training.tokens import keep_tokens

# section → key → value, not yet validated
Sections = dict[str, dict[str, Any]]

DEFAULT_MINUTES = {"cpu": 5.0, "mps": 5.0, "cuda": 20.0}
# Fraction of the minutes for training steps. The rest is for starting, decoding, augmentation and
# evaluation.
_TRAINING_FRACTION = 0.8
# Smaller images lose what tells their class: Fashion-MNIST at 20 px until 60 % of eight epochs had
# 92.1 % on test images, at its 28 px in ten epochs 92.7 %.
_MIN_REDUCED_SIDE = 24
# Images whose sizes are read.
_SAMPLE = 64
# Pixels up to which images are trained at their own size.
_MAX_SMALL_SIDE = 48
# Images of different shapes are padded where a square would leave out more than this fraction.
# Photos of 3:2 and 2:3 (a third left out): padded 71 %, cropped 74 % of 600 unseen ones (4 × 150 of
# Imagenette, same time, one or two seeds). Pictures of 5:1 with the object at an end: 67 % and
# 50 %.
_PADDED_CUT = 0.5
# Fewer photos than these are overfitted by a model of 6 blocks at 128 px: on 4 × 200 photos of
# Imagenette 75.6 %, where 4 blocks at 64 px gave 80.6 % in a third of the time (2 cores, one seed).
_ENOUGH_PHOTOS = 3000
_PRETRAINED_HINT = (
    "so few photos are mostly classified better from pretrained weights "
    "(a ViT-S, 10 classes of 30 photos: 86 % right, from scratch 57 %); "
    "--init timm:vit_small_patch16_224 starts from some (a download of 88 MB, Apache-2.0, once)"
)
# Fine-tuning uses this fraction of the minutes left after the probe. The rest is for augmentation
# and for other programs of the machine.
_FINE_TUNING_FRACTION = 0.85
# With fewer epochs, fine-tuning changes the weights but does not converge.
_MIN_FINE_TUNING_EPOCHS = 2.0
# Fraction of blocks that stay frozen → epochs of the other blocks that must fit into the time. 10 ×
# 30 photos of Imagenette, ViT-S/14: 83.5 % on unseen photos after 8 epochs of 3 of 11 blocks, the
# probe 78.5 %. 4 × 200: 88.7 % after 4 epochs of 4 of 10 blocks, the probe 84.6 %.
_FROZEN_FRACTIONS = {0.0: 8.0, 0.5: 12.0, 0.75: 0.0}
# Fraction of the patches that steps on tokens drop (84.8 % instead of 83.5 % above), and the
# fraction of a step's time that is left.
_DROP_RATE = 0.5
_DROPPED_COST = 0.65
# With fewer validation images nothing follows the probe: of 10 × 5 photos ten are for validation,
# and fine-tuning was right on one more of these, and on 2 in 100 fewer of 240 unseen ones.
_MIN_VALIDATION_IMAGES = 20
# One evaluation per this many validation images: with more, the best is best by chance. With 80
# validation images the third of ten epochs won by one image, and was worse than the probe
# elsewhere.
_IMAGES_AN_EVALUATION = 100
# At most this fraction of the minutes is for computing features.
_FEATURE_FRACTION = 0.5
# It isn't worth leaving out a few images: from this fraction on the probe takes all.
_NEARLY_ALL = 0.75
_MIN_PROBED_IMAGES = 200


@dataclass(frozen=True)
class _Task:
    """The images, the device and the minutes that a configuration is chosen for.

    Attributes:
        num_images: Images to train on.
        side: Median of the images' shorter sides, pixels.
        aspect: Width / height of the input; 1 unless a square would leave out much of the images.
        pads: Images have so different shapes that they are padded.
        is_grey: True for images of at most `_MAX_SMALL_SIDE` pixels without colours.
        pretrained_size: Image size of the weights to start from, pixels; None without any.
        pretrained_patch: Patch size of these weights.
        overrides: `key.path=value` of the user.
        user: The same, by section and key.
        source: Keys of the section `data` that name the images.
        started_at: When the minutes began, by `time.perf_counter`.
    """

    num_images: int
    num_classes: int
    side: int
    aspect: float
    pads: bool
    is_grey: bool
    device: torch.device
    minutes: float
    pretrained_size: tuple[int, int] | None
    pretrained_patch: tuple[int, int] | None
    overrides: Sequence[str]
    user: Sections
    source: Mapping[str, Any]
    started_at: float

    @property
    def is_small(self) -> bool:
        """True if the images are trained from scratch at their own size."""
        return self.pretrained_size is None and self.side <= _MAX_SMALL_SIDE

    @property
    def is_photo(self) -> bool:
        """True if the images are trained from scratch and scaled down."""
        return self.pretrained_size is None and self.side > _MAX_SMALL_SIDE

    def load(self, sections: Sections) -> Config:
        """Return the configuration of `sections`, with what the user sets."""
        return load_config(sections, self.overrides)

    @property
    def time_limit(self) -> str:
        """The minutes, for a reason."""
        return f"{self.minutes:g} minutes (--minutes) on this {self.device.type.upper()}"

    @property
    def has_length(self) -> bool:
        """True if the user says how long to train."""
        return bool(self.user["train"].keys() & {"epochs", "max_steps"})


class _Row(NamedTuple):
    """A recipe, and when and why it is taken.

    Attributes:
        condition: The images and the device that the recipe is for.
        reason: Reason of the image size; it may name attributes of the task.
        max_side: Pixels that larger images are scaled down to; 0 for the images' own size.
        min_epochs: Epochs that the minutes must hold.
        changes: Keys of the recipe to override, with their new values.
        hint: Advice for the user.
    """

    recipe: str
    condition: Callable[[_Task], bool]
    reason: str
    max_side: int = 0
    min_epochs: int = 0
    changes: Mapping[str, Any] = {}
    hint: str = ""


_OWN_SIZE = "the images' own size"
# The first row is taken whose condition holds and whose epochs fit into the minutes.
_ROWS = (
    _Row(
        "folder/finetune",
        lambda task: task.pretrained_size is not None,
        "the size of the images that its weights were trained on",
    ),
    _Row("digits", lambda task: task.is_small and task.side <= 16, _OWN_SIZE),
    _Row("cifar10/speedrun", lambda task: task.is_small and task.device.type == "cuda", _OWN_SIZE),
    # Images without colours are often drawn, scanned or centred: crops cost accuracy in few epochs.
    _Row(
        "fashion_mnist/cpu-20-minutes",
        lambda task: task.is_small and task.is_grey,
        _OWN_SIZE,
        min_epochs=10,
    ),
    _Row("fashion_mnist/cpu", lambda task: task.is_small and task.is_grey, _OWN_SIZE),
    _Row("cifar10/cpu-20-minutes", lambda task: task.is_small, _OWN_SIZE, min_epochs=20),
    _Row("cifar10/cpu", lambda task: task.is_small, _OWN_SIZE),
    # With these changes 84.7 and 82.4 % on unseen images of two sets of 4 × 200 photos, where the
    # recipe alone gave 82.4 and 81.1 %.
    _Row(
        "folder/small",
        lambda task: task.is_photo and task.num_images < _ENOUGH_PHOTOS,
        "a model at {side} px would overfit {num_images:,} images",
        max_side=64,
        changes={"augment.cutmix": 1.0, "optimizer.weight_decay": 0.1},
        hint=_PRETRAINED_HINT,
    ),
    _Row(
        "imagenette/cpu",
        lambda task: task.is_photo and task.num_images < 2 * _ENOUGH_PHOTOS,
        "{side} px take more time",
        max_side=128,
        min_epochs=12,
        changes={"model.drop_path_rate": 0.1},
    ),
    _Row(
        "imagenette/cpu",
        lambda task: task.is_photo and task.num_images >= 2 * _ENOUGH_PHOTOS,
        "{side} px take more time",
        max_side=128,
        min_epochs=12,
    ),
    _Row(
        "folder/small",
        lambda task: task.is_photo,
        "the minutes are too few for more of {side} px",
        max_side=64,
    ),
)


class Choice(NamedTuple):
    """A configuration that was chosen for images.

    Attributes:
        reasons: Values that were chosen, with their reasons, by name.
        parts: Parts of the run that were opened and built for the choice.
    """

    config: Config
    reasons: dict[str, str]
    parts: RunParts


def choose_config(
    data: str | Path,
    overrides: Sequence[str] = (),
    minutes: float | None = None,
    *,
    class_weights: Mapping[str, float] | None = None,
) -> Choice:
    """Choose a configuration for images.

    Args:
        data: A data set's name, a folder, a table or shards. See
            `vit.data.sources.registry.find_kind`.
        overrides: `key.path=value` of the user.
        minutes: Minutes of training; None for `DEFAULT_MINUTES`.
        class_weights: See `build_data`.

    Raises:
        ValueError: The images can't be opened, or the overrides don't fit.
    """
    started_at = time.perf_counter()
    # Steps are timed as they will run.
    keep_freed_memory()
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes {minutes} must be more than 0")
    user = _read_overrides(overrides)
    kind = find_kind(data)
    source: dict[str, Any] = {"name": kind}
    # A user's photos often are bursts, or were saved twice.
    if kind == "folder":
        source["group_duplicates"] = True
    if kind != str(data):
        source["root"] = str(data)
    # Listing needs no image size: 32 only fills the place of the size that is chosen later.
    splits = build_dataset(load_config({"data": source | user["data"] | {"image_size": 32}}))
    images = splits.split("train")
    num_classes = len(images.class_names)
    loaded = None
    pretrained = None
    if user["model"].get("init"):
        recipe = load_config(find_recipe("folder/finetune"), overrides)
        loaded, pretrained = load_initial_model(recipe, num_classes=num_classes)

    device = choose_device(find_device(overrides))
    survey = survey_images(images, count=_SAMPLE)
    side = round(survey.shorter_side)
    aspect, pads = 1.0, False
    if not user["data"].keys() & {"image_size", "resize_mode"}:
        aspect, pads = _choose_shape(survey)
    task = _Task(
        num_images=len(images),
        num_classes=num_classes,
        side=side,
        aspect=aspect,
        pads=pads,
        is_grey=side <= _MAX_SMALL_SIDE and are_grey(images, count=_SAMPLE),
        device=device,
        minutes=minutes or DEFAULT_MINUTES[device.type],
        pretrained_size=None if loaded is None else loaded.patch_embed.img_size,
        pretrained_patch=None if loaded is None else loaded.patch_embed.patch_size,
        overrides=overrides,
        user=user,
        source=source,
        started_at=started_at,
    )
    rows = [row for row in _ROWS if row.condition(task)]
    if loaded is not None:
        sections = _adapt_recipe(rows[0], task)
        config = task.load(sections)
        # Fitting a probe needs all processes of a run, but only the main one is here.
        if uses_probe(config) and current_process().world_size == 1:
            resize_model(config, loaded)
            decoded = build_data(
                config, splits, device=device, pretrained=pretrained, class_weights=class_weights
            )
            loaded.to(device)
            return _choose_fine_tuning(rows[0], sections, task, decoded, loaded)
    sections, model, reasons = _choose_by_speed(rows, task, loaded)
    parts = RunParts(splits=splits, model=model, pretrained=pretrained)
    return Choice(task.load(sections), reasons, parts)


def find_device(overrides: Sequence[str]) -> str:
    """Return `train.device` of a configuration that is yet to be chosen."""
    return str(_read_overrides(overrides)["train"].get("device", "auto"))


def _read_overrides(overrides: Sequence[str]) -> Sections:
    """Return what the user sets, with every section in it. What isn't a section is refused later
    with the whole configuration."""
    sections = read_sections(None, overrides)
    known = {name: keys for name, keys in sections.items() if isinstance(keys, dict)}
    return {name: known.get(name, {}) for name in (*Config.model_fields, *known)}


def _choose_by_speed(
    rows: Sequence[_Row], task: _Task, loaded: VisionTransformer | None
) -> tuple[Sections, VisionTransformer, dict[str, str]]:
    """Choose the first row whose epochs fit into the minutes, or the last one.

    Returns:
        The sections of the configuration, the model whose speed was measured, and the reasons.
    """
    for row in rows:
        sections = _adapt_recipe(row, task)
        config = task.load(sections)
        if loaded is not None:
            model = loaded
            resize_model(config, model)
        else:
            model, _ = build_model(config, num_classes=task.num_classes)
        images_per_second = measure_training_rate(config, model, device=task.device)
        seconds = 60 * task.minutes * _TRAINING_FRACTION
        epochs = seconds * images_per_second / task.num_images
        if epochs >= row.min_epochs:
            break
    _set_length(sections, task, epochs)
    if not task.has_length:
        minutes_left = task.minutes - (time.perf_counter() - task.started_at) / 60
        minutes_left = max(minutes_left, _TRAINING_FRACTION * task.minutes)
        sections["train"]["max_minutes"] = float(f"{minutes_left:.3g}")

    config = task.load(sections)
    set_up_training(config, model)
    length = f"{task.time_limit}, {images_per_second:,.0f} images/s"
    if config.train.epochs < int(epochs):
        length = f"enough for {task.num_images:,} images; {length}, hold {epochs:,.0f}"
    return sections, model, _explain_choices(config, task, row, length)


def _adapt_recipe(row: _Row, task: _Task) -> Sections:
    """Return the row's recipe, with a size, patch, batch and regularisation that fit the images and
    what the user sets."""
    sections: Sections = read_sections(find_recipe(row.recipe))
    data = sections["data"]
    model = sections["model"]
    train = sections["train"]
    # The recipe's own values are for the classes and the number of images of its data set.
    data.pop("validation_fraction", None)
    train["class_balance"] = "auto"
    # A minute of compiling pays in runs as long as the recipe's.
    train["compile"] = "auto"
    for key, value in row.changes.items():
        section, _, name = key.partition(".")
        sections[section][name] = value

    if task.pads:
        data["resize_mode"] = "pad"
    if task.pretrained_size is not None:
        data["image_size"] = _shorten(task.pretrained_size)
        if task.aspect != 1:
            # as many patches, in another shape
            wanted = task.user["model"].get("patch_size") or task.pretrained_patch
            assert wanted is not None
            patch_size = as_pair(wanted, name="model.patch_size")
            height, width = _shape_area(math.prod(task.pretrained_size), task.aspect)
            data["image_size"] = _fit_sides((height, width), patch_size)
        # about ten steps an epoch, also with few images
        near_a_tenth = 2 ** round(math.log2(max(task.num_images, 1) / 10))
        train["batch_size"] = min(max(near_a_tenth, 8), train["batch_size"])
        # The weights have a crop of their own.
        del data["crop_pct"]
        data |= task.source
        return sections

    # The power of two near √(2n), as in the recipes: 32 for 576 images, 256 for 45,000. Four times
    # that on GPUs.
    train["batch_size"] = max(2 ** round(math.log2(2 * task.num_images) / 2), 8)
    if task.device.type == "cuda":
        train["batch_size"] *= 4
    # A preset has a size and patches of its own.
    if "preset" in task.user["model"]:
        sections["model"] = {}
    else:
        _fit_patches(data, model, _choose_sides(row, task), task.user)
    smallest = min((fraction for _, fraction in train.get("image_sizes") or ()), default=1)
    if smallest * min(as_pair(data["image_size"], name="data.image_size")) < _MIN_REDUCED_SIDE:
        train["image_sizes"] = None
    data |= task.source
    return sections


def _choose_shape(survey: Survey) -> tuple[float, bool]:
    """Choose the shape of the input: a square; where that leaves out much, the typical shape of the
    images; and where their shapes differ and a square leaves out most of them, a padded square.

    Returns:
        Width / height, and true to pad.
    """
    cut = np.median(survey.measure_cuts(Preprocess((1000, 1000))))
    if cut <= MAX_CUT:
        return 1.0, False
    height, width = _shape_area(1000**2, survey.aspect)
    # The mean, because a half of them may be upright and the other half lie.
    if survey.measure_cuts(Preprocess((round(height), round(width)))).mean() <= MAX_CUT:
        return survey.aspect, False
    return 1.0, bool(cut > _PADDED_CUT)


def _shape_area(area: float, aspect: float) -> tuple[float, float]:
    """Return height and width of a rectangle."""
    return math.sqrt(area / aspect), math.sqrt(area * aspect)


def _choose_sides(row: _Row, task: _Task) -> tuple[float, float]:
    """Choose height and width: the images' own, or smaller ones with the area of the row's
    square."""
    own_area = task.side**2 * max(task.aspect, 1 / task.aspect)
    return _shape_area(min(own_area, (row.max_side or _MAX_SMALL_SIDE) ** 2), task.aspect)


def _fit_sides(sides: tuple[float, float], patch_size: tuple[int, int]) -> int | list[int]:
    """Round height and width to whole patches."""
    height, width = (
        max(round(side / patch), 1) * patch for side, patch in zip(sides, patch_size, strict=True)
    )
    return _shorten((height, width))


def _fit_patches(
    data: dict[str, Any], model: dict[str, Any], sides: tuple[float, float], user: Sections
) -> None:
    """Set image and patch size: about as many patches as in the recipe, an image of whole
    patches."""
    user_size = user["data"].get("image_size")
    # as many patches as in the recipe
    scale = math.sqrt(math.prod(sides)) / data["image_size"]
    height, width = round(sides[0]), round(sides[1])
    if user_size is not None:
        height, width = as_pair(user_size, name="data.image_size")
        # on the shorter side
        scale = min(height, width) / data["image_size"]
    ideal_patch = max(model["patch_size"] * scale, 2)
    patch_size = user["model"].get("patch_size")
    if not patch_size:
        sizes = list(range(1, min(height, width) + 1))
        # Patches divide both sides of an image size that is given.
        if user_size is not None:
            sizes = [size for size in sizes if math.gcd(height, width) % size == 0]
        # the nearest power of two, or else the nearest size
        patch_size = min(
            sizes,
            key=lambda size: (not _is_power_of_two(size), abs(math.log(size / ideal_patch))),
        )

    patch_height, patch_width = as_pair(patch_size, name="model.patch_size")
    data["image_size"] = _fit_sides((height, width), (patch_height, patch_width))
    model["patch_size"] = patch_size
    # The convolutional stems halve the image until it is the grid of patches.
    if not (_is_power_of_two(patch_height) and _is_power_of_two(patch_width)):
        model["stem"] = "patch"


def _is_power_of_two(size: int) -> bool:
    return size > 1 and size & (size - 1) == 0


def _shorten(sides: tuple[int, int]) -> int | list[int]:
    if sides[0] == sides[1]:
        return sides[0]
    return list(sides)


def _set_length(sections: Sections, task: _Task, epochs: float) -> None:
    """Set the number of epochs and what depends on it.

    Args:
        sections: Sections of the configuration, which are changed.
        task: The images, the device and the minutes.
        epochs: Epochs that the minutes hold.
    """
    train = sections["train"]
    max_epochs = train["epochs"]
    if task.pretrained_size is None:
        # About 80 epochs for 600 images: more overfits. Recipes are for more images.
        epochs_for_images = round(min(80 * (600 / task.num_images) ** 0.5, 150))
        max_epochs = max(epochs_for_images, 2 * max_epochs)
    # Such a short time is enough for the head alone.
    elif epochs < 2:
        sections["model"]["freeze"] = "backbone"

    train["epochs"] = min(max(int(epochs), 1), max_epochs)
    # `load_config` applies what the user sets again, but what depends on it is set here.
    user_epochs = task.user["train"].get("epochs")
    if user_epochs is not None:
        train["epochs"] = user_epochs
    elif epochs < 1:
        num_steps = int(epochs * task.num_images / train["batch_size"])
        train["max_steps"] = max(num_steps, 1)
    train["evaluate_every_epochs"] = max(train["epochs"] // 16, 1)


def _choose_fine_tuning(
    row: _Row, sections: Sections, task: _Task, data: TrainingData, model: VisionTransformer
) -> Choice:
    """Fit a probe, and train as many of its blocks, for as long, as the rest of the minutes allows.

    Args:
        row: The row that was taken.
        sections: Sections of the configuration, which are changed.
        task: The images, the device and the minutes.
        data: The images.
        model: The model with the pretrained weights.
    """
    device = task.device
    forward_rate = measure_forward_rate(model, device=device)
    max_images = int(_FEATURE_FRACTION * 60 * task.minutes * forward_rate)
    config = task.load(sections)
    if max_images < _NEARLY_ALL * task.num_images:
        # Keep a minimum in case the measured speed is wrong. Numbers are few, because another
        # number makes another run, and needs features of other images.
        numbers = [_MIN_PROBED_IMAGES]
        while numbers[-1] < task.num_images:
            numbers.append(int(_MIN_PROBED_IMAGES * 2 ** (len(numbers) / 2)))
        affordable = max(number for number in numbers if number <= max(max_images, numbers[0]))
        # More images are free if an earlier run has computed their features.
        more = [number for number in numbers if number > affordable]
        cached = find_cached_number(model, data, reversed(more), device=device)
        if cached is None or cached < task.num_images:
            sections["model"]["probe"] = cached or affordable
        config = task.load(sections)
    probe = fit_to_data(config, model, data, device=device)
    probed = build_probed_model(config, model, probe.probe).to(device)

    tokens = None
    num_validation = len(data.validation or ())
    is_asked_for = task.has_length or "freeze" in task.user["model"]
    if is_probe_alone(config):
        length = "linear probe only (given)"
    elif 0 < num_validation < _MIN_VALIDATION_IMAGES and not is_asked_for:
        sections["model"]["freeze"] = "backbone"
        length = (
            f"linear probe only; {num_validation} validation images can't tell whether fine-tuning it"
            " would help (--folds 5 fits it on all images)"
        )
    else:
        # At the end all images pass through the model once more, for what its file holds of them.
        num_described = min(task.num_images, config.train.max_training_features) + num_validation
        # With few validation images the best of many models would be best by chance.
        num_evaluations = max(num_validation // _IMAGES_AN_EVALUATION, 1)
        num_passed = num_described + num_evaluations * num_validation
        deadline = task.started_at + 60 * task.minutes - num_passed / forward_rate
        data, tokens, length = _plan_epochs(
            sections, task, data, probed, forward_rate=forward_rate, deadline=deadline
        )
        train = sections["train"]
        train["evaluate_every_epochs"] = math.ceil(train["epochs"] / num_evaluations)

    config = task.load(sections)
    set_up_training(config, probed)
    parts = RunParts(
        splits=data.splits,
        model=probed,
        data=replace(data, config=config),
        probe=probe,
        uncut_model=model if is_probe_alone(config) else None,
        tokens=tokens,
    )
    return Choice(config, _explain_choices(config, task, row, length), parts)


def _plan_epochs(
    sections: Sections,
    task: _Task,
    data: TrainingData,
    model: VisionTransformer,
    *,
    forward_rate: float,
    deadline: float,
) -> tuple[TrainingData, Tensor | None, str]:
    """Set how many blocks are trained after the probe, and for how many epochs.

    Args:
        sections: Sections of the configuration, which are changed.
        task: The images, the device and the minutes.
        data: The images.
        model: The model that ends at the probe's block.
        forward_rate: Images that pass through the whole model in a second.
        deadline: When the training must end, by `time.perf_counter`.

    Returns:
        The data and the tokens, if blocks are frozen; and the reason of the length.
    """
    seconds_left = max(deadline - time.perf_counter(), 0.0)
    num_frozen, epochs = _choose_num_frozen(
        len(model.blocks),
        # the backward pass costs twice the forward
        image_seconds=3 / forward_rate,
        seconds=_FINE_TUNING_FRACTION * seconds_left,
        num_images=task.num_images,
    )
    images = data
    tokens = None
    rate = 0.0
    # With too little time, tokens and the measurement would take all of it.
    if epochs >= _MIN_FINE_TUNING_EPOCHS or task.has_length:
        config = task.load(sections)
        if "freeze" in task.user["model"]:
            num_frozen = 0
            if isinstance(config.model.freeze, int):
                num_frozen = config.model.freeze
        if num_frozen:
            # The frozen blocks' tokens are the same in each epoch. Dropping random patches takes
            # the place of crops, and saves a third of the time.
            sections["model"]["freeze"] = num_frozen
            sections["augment"] = {"flip": sections["augment"]["flip"]}
            sections["train"]["patch_drop_rates"] = [[1.0, _DROP_RATE]]
            config = task.load(sections)
            set_up_training(config, model)
            data, tokens = keep_tokens(model, replace(data, config=config), device=task.device)
        # as it will run
        rate = measure_training_rate(config, model, device=task.device, data=data, tokens=tokens)
        seconds_left = max(deadline - time.perf_counter(), 0.0)
        epochs = _FINE_TUNING_FRACTION * seconds_left * rate / task.num_images
    train = sections["train"]
    train["epochs"] = min(max(int(epochs), 1), train["epochs"])
    length = task.time_limit
    if task.has_length:
        return data, tokens, length
    if epochs < _MIN_FINE_TUNING_EPOCHS:
        sections["model"]["freeze"] = "backbone"
        length = f"linear probe only; {length} hold {epochs:.1f} epochs of fine-tuning"
        return images, None, length
    train["max_minutes"] = float(f"{seconds_left / 60:.3g}")
    if num_frozen:
        length += f", with {num_frozen} of {len(model.blocks)} blocks frozen"
    length += f", of which {seconds_left / 60:.1f} are left after the probe"
    return data, tokens, f"{length}, {rate:,.0f} images/s"


def _choose_num_frozen(
    depth: int, *, image_seconds: float, seconds: float, num_images: int
) -> tuple[int, float]:
    """Choose how many blocks stay frozen, so that the time holds enough epochs of the others.

    Args:
        depth: Blocks of the model.
        image_seconds: Seconds of training the whole model on an image; a third of it is the forward
            pass.
        seconds: Seconds to train in.
        num_images: Images to train on.

    Returns:
        The number of blocks, and the number of epochs that the time holds.
    """
    for fraction, min_epochs in _FROZEN_FRACTIONS.items():
        num_frozen = int(fraction * depth)
        share = num_frozen / depth
        # The images and their mirror images pass through the frozen blocks once.
        token_seconds = 2 / 3 * share * num_images * image_seconds
        epoch_seconds = (1 - share) * num_images * image_seconds
        if num_frozen:
            epoch_seconds = (1 - share) * _DROPPED_COST * num_images * image_seconds
        epochs = max(seconds - token_seconds, 0.0) / epoch_seconds
        if epochs >= min_epochs:
            break
    return num_frozen, epochs


def _explain_choices(config: Config, task: _Task, row: _Row, length: str) -> dict[str, str]:
    """Return the values that were chosen, with their reasons, by name.

    Args:
        config: The configuration that was chosen.
        task: The images, the device and the minutes.
        row: The row that was taken.
        length: Reason of the length.
    """
    regularisation = "as in the recipe"
    if row.changes:
        regularisation = f"more than in the recipe for so few as {task.num_images:,} images"
    batch = f"near √(2 × {task.num_images:,} images)"
    size_keys = ["data.image_size", "model.patch_size"]
    if task.pretrained_size is not None:
        batch = "as in the recipe"
        # The patches are those of the weights.
        size_keys = ["data.image_size"]
    size = row.reason.format(side=task.side, num_images=task.num_images)
    if task.aspect != 1:
        size += "; a square would leave out more than a quarter of the typical image"
    if task.pads:
        size_keys.append("data.resize_mode")
        size += "; a crop would leave out more than half of images of so different shapes"
    chosen = {"image size": (size_keys, size)}
    # No step follows the probe.
    if not is_probe_alone(config):
        chosen["length"] = (["train.epochs"], length)
        chosen["batch"] = (["train.batch_size"], batch)
        keys = ["augment.cutmix", "optimizer.weight_decay", "model.drop_path_rate"]
        chosen["regularisation"] = (keys, regularisation)

    choices = {
        "recipe": f"{row.recipe}; set augment.flip=none where left and right matter, as in letters"
    }
    values = flatten_config(config)
    user_keys = {f"{section}.{key}" for section, keys in task.user.items() for key in keys}
    for name, (keys, reason) in chosen.items():
        text = ", ".join(f"{key.partition('.')[2]}={values[key]}" for key in keys)
        # "given" only if the user set all of them
        is_given = user_keys.issuperset(keys)
        choices[name] = f"{text} ({'given' if is_given else reason})"
    if is_probe_alone(config):
        choices["length"] = length
    if row.hint:
        choices["pretrained weights"] = f"none; {row.hint}"
    return choices
