"""A configuration for images that come without one, chosen from their number and sizes, the device
and the minutes.

It starts from a packaged recipe, which is measured, and fits size, batch, length and regularisation
to the images. What the user sets with `key.path=value` holds, and what depends on it follows.
"""

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vit.config import Config, flatten_config, load_config, read_sections
from vit.data.sources.registry import find_kind
from vit.data.splits import DatasetSplits
from vit.data.statistics import are_grey, measure_shorter_side
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import as_pair
from vit.runtime.device import autocast, choose_device, choose_precision, free_cached_memory
from vit.runtime.memory import keep_freed_memory
from vit.runtime.processes import Process, current_process
from vit.training.data import TrainingData, build_data, build_dataset, build_train_loader
from vit.training.execution import time_blank_steps, time_steps
from vit.training.model import build_model, set_up_training
from vit.training.probe import (
    FittedProbe,
    build_probed_model,
    fit_to_data,
    is_probe_alone,
    uses_probe,
)
from vit.training.recipe import find_recipe
from vit.training.run import build_plan, build_train_step
from vit.training.tokens import keep_tokens

# section → key → value, not yet validated
Sections = dict[str, dict[str, Any]]

DEFAULT_MINUTES = {"cpu": 5.0, "cuda": 20.0}
# of the minutes: the rest is for starting, decoding, augmentation and evaluation
_TRAINING_FRACTION = 0.8
# at less than this an image loses what tells its class: Fashion-MNIST at 20 px until 60 % of eight
# epochs had 92.1 % on test images, at its 28 px in ten 92.7 %
_MIN_REDUCED_SIDE = 24
# images whose sizes are read
_SAMPLE = 64
# pixels, up to which images are trained at their own size
_MAX_SMALL_SIDE = 48
# Fewer photos than these are overfitted by a model of 6 blocks at 128 px: of 4 × 200 of
# Imagenette's, 75.6 % where 4 blocks at 64 px gave 80.6 % in a third of the time (2 cores, one
# seed). Cutmix, weight decay of 0.1 and 80 epochs gave 84.7 and 82.4 % on 1,525 and 1,601 other
# images of two such sets, where 40 epochs without gave 82.4 and 81.1 %.
_ENOUGH_PHOTOS = 3000
_PRETRAINED_HINT = (
    "so few photos are mostly classified better from pretrained weights "
    "(a ViT-S, 10 classes of 30 photos: 86 % right, from scratch 57 %); "
    "--init timm:vit_small_patch16_224 starts from some (a download of 88 MB, Apache-2.0, once)"
)
# After a probe, of what is left of the minutes: the rest is for augmentation and what a machine does
# beside. Fewer epochs of fine-tuning than these move the weights and come to no rest.
_FINE_TUNING_FRACTION = 0.85
_MIN_FINE_TUNING_EPOCHS = 2.0
# Of the probed model's blocks, that stay frozen where the time holds so many epochs of the others;
# the last one in any case. Of 10 × 30 photos of Imagenette's, a ViT-S/14 at 112 px and 400 unseen ones:
# the probe 78.5 %, 8 epochs of the upper 2, 3 or 5 of 11 blocks 81.2, 83.5 and 83.0 %; with half of
# the patches dropped 84.8 % of 3 blocks, in 2/3 of the time, and 84.2 % after 15 epochs (one draw).
# Of 4 × 200: the probe 84.6 %, 4 and 8 epochs of the upper 4 of 10 blocks 88.7 and 92.1 %.
_FROZEN_FRACTIONS = {0.0: 8.0, 0.5: 12.0, 0.75: 0.0}
# patches that steps on tokens drop, and what is left of a step's time
_DROP_RATE = 0.5
_DROPPED_COST = 0.65
# Validation images without which nothing follows the probe: of 10 × 5 photos ten are for validation,
# and fine-tuning was right on one more of these, and on 2 in 100 fewer of 240 unseen ones.
_MIN_VALIDATION_IMAGES = 20
# Validation images for each model that they choose among, beside the probe. Of 4 × 200 photos 80 chose
# the model of the third of ten epochs, by one image: on unseen ones it was below the probe.
_IMAGES_AN_EVALUATION = 100
# of the minutes, for the pass of all images through the weights
_FEATURE_FRACTION = 0.5
# of all images, that are not worth leaving out a few of them for
_NEARLY_ALL = 0.75
# images whose pass through the weights is timed
_TIMED_IMAGES = 16
_MIN_PROBED_IMAGES = 200

# what is chosen for the images, whatever the recipe: its name → the keys
_CHOSEN_KEYS = {
    "image size": ("data.image_size", "model.patch_size"),
    "length": ("train.epochs",),
    "batch": ("train.batch_size",),
    "regularisation": ("augment.cutmix", "optimizer.weight_decay", "model.drop_path_rate"),
}


@dataclass(frozen=True)
class _Task:
    """What a configuration is chosen for."""

    num_images: int  # to train on
    num_classes: int
    side: int  # the images' shorter one in pixels, median
    is_grey: bool  # whether images of at most `_MAX_SMALL_SIDE` have no colours
    device: torch.device
    minutes: float
    pretrained_size: tuple[int, int] | None  # of the weights to start from, pixels
    user: Sections  # what the user sets


class Choice(NamedTuple):
    """A configuration that was chosen for images."""

    config: Config
    # what was chosen by name, with its reason
    reasons: dict[str, str]
    # the images, opened
    splits: DatasetSplits
    # that the run starts from, where it was fitted to choose its length
    probe: FittedProbe | None = None


class _Candidate(NamedTuple):
    """A recipe at an image size, taken where the minutes hold at least `min_epochs` of it."""

    recipe: str
    size_reason: str
    side: int = 0  # pixels; 0 for the pretrained weights' own
    min_epochs: int = 0


def choose_config(
    data: str | Path, overrides: Sequence[str] = (), minutes: float | None = None
) -> Choice:
    """Choose a configuration for images.

    Args:
        data: what `vit.data.sources.registry.find_kind` knows: a data set's name, a folder, a table or shards.
        overrides: `key.path=value` of the user.
        minutes: of training; None for `DEFAULT_MINUTES`.

    Raises:
        ValueError: images that can't be opened, or overrides that don't fit.
    """
    started_at = time.perf_counter()
    # steps are timed as they will run
    keep_freed_memory()
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes {minutes} must be more than 0")
    user = _read_overrides(overrides)
    kind = find_kind(data)
    source: dict[str, str | bool | None] = {"name": kind}
    # own photos often are bursts, or were saved twice
    if kind == "folder":
        source["group_duplicates"] = True
    if kind != str(data):
        source["root"] = str(data)
    # the size is yet to be chosen, and to list images takes none
    data_section = source | user["data"] | {"image_size": 32}
    splits = build_dataset(load_config({"data": data_section}))

    train_images = splits.split("train")
    device = choose_device(find_device(overrides))
    num_classes = len(train_images.class_names)
    pretrained_size = None
    if init := user["model"].get("init"):
        # timm, which takes seconds to import
        from vit.model.timm_weights import load_pretrained

        model, _ = load_pretrained(str(init), num_classes=num_classes)
        pretrained_size = model.patch_embed.img_size
    side = round(measure_shorter_side(train_images, count=_SAMPLE))
    task = _Task(
        num_images=len(train_images),
        num_classes=num_classes,
        side=side,
        is_grey=side <= _MAX_SMALL_SIDE and are_grey(train_images, count=_SAMPLE),
        device=device,
        minutes=minutes or DEFAULT_MINUTES[device.type],
        pretrained_size=pretrained_size,
        user=user,
    )

    if pretrained_size is not None:
        (candidate,) = _list_candidates(task)
        sections = _adapt_recipe(candidate, task)
        sections["data"] |= source
        config = load_config(sections, overrides)
        # it takes all processes of a run, and the others wait for this choice
        if uses_probe(config) and current_process().world_size == 1:
            probe, length = _plan_fine_tuning(sections, overrides, splits, task, started_at)
            config = load_config(sections, overrides)
            choices = _explain_choices(config, task, candidate, length)
            return Choice(config, choices, splits, probe)

    # the first recipe that the minutes hold enough epochs of
    for candidate in _list_candidates(task):
        sections = _adapt_recipe(candidate, task)
        sections["data"] |= source
        images_per_second = _measure_rate(load_config(sections, overrides), task)
        seconds = 60 * task.minutes * _TRAINING_FRACTION
        epochs = seconds * images_per_second / task.num_images
        if epochs >= candidate.min_epochs:
            break
    _set_length(sections, task, epochs)
    if not task.user["train"].keys() & {"epochs", "max_steps"}:
        minutes_left = task.minutes - (time.perf_counter() - started_at) / 60
        minutes_left = max(minutes_left, _TRAINING_FRACTION * task.minutes)
        sections["train"]["max_minutes"] = float(f"{minutes_left:.3g}")

    config = load_config(sections, overrides)
    length = f"{task.minutes:g} minutes (--minutes) on this {task.device.type.upper()}"
    length += f", {images_per_second:,.0f} images/s"
    if config.train.epochs < int(epochs):
        length = f"enough for {task.num_images:,} images; {length}, hold {epochs:,.0f}"
    return Choice(config, _explain_choices(config, task, candidate, length), splits)


def find_device(overrides: Sequence[str]) -> str:
    """`train.device` of a configuration that is yet to be chosen."""
    return str(_read_overrides(overrides)["train"].get("device", "auto"))


def _read_overrides(overrides: Sequence[str]) -> Sections:
    """What the user sets, every section among it; what isn't a section is refused with the whole
    configuration."""
    sections = read_sections(None, overrides)
    known = {name: keys for name, keys in sections.items() if isinstance(keys, dict)}
    return {name: known.get(name, {}) for name in (*Config.model_fields, *known)}


def _list_candidates(task: _Task) -> list[_Candidate]:
    """Best first; the last is taken in any case."""
    on_gpu = task.device.type == "cuda"
    side = task.side
    if task.pretrained_size is not None:
        return [_Candidate("folder/finetune", "the size that its weights were trained at")]
    if side <= _MAX_SMALL_SIDE:
        size_reason = "the images' own size"
        if side <= 16:
            return [_Candidate("digits", size_reason, side)]
        if on_gpu:
            return [
                _Candidate("cifar10/best", size_reason, side, min_epochs=60),
                _Candidate("cifar10/speedrun", size_reason, side),
            ]
        # such as drawn, scanned or centred things: crops cost accuracy in few epochs
        if task.is_grey:
            return [
                _Candidate("fashion_mnist/cpu-20-minutes", size_reason, side, min_epochs=10),
                _Candidate("fashion_mnist/cpu", size_reason, side),
            ]
        return [
            _Candidate("cifar10/cpu-20-minutes", size_reason, side, min_epochs=20),
            _Candidate("cifar10/cpu", size_reason, side),
        ]

    large = min(side, 128)
    small = min(side, 64)
    if task.num_images < _ENOUGH_PHOTOS:
        size_reason = f"{side} px would be overfitted by {task.num_images:,} images"
        return [_Candidate("folder/small", size_reason, small)]
    too_slow = f"{side} px take more time"
    too_few_minutes = f"the minutes are too few for more of {side} px"
    candidates = [
        _Candidate("imagenette/cpu", too_slow, large, min_epochs=12),
        _Candidate("folder/small", too_few_minutes, small),
    ]
    if on_gpu:
        candidates.insert(0, _Candidate("imagenette/gpu", too_slow, large, min_epochs=30))
    return candidates


def _adapt_recipe(candidate: _Candidate, task: _Task) -> Sections:
    """The candidate's recipe, with a size, patch, batch and regularisation that fit the images and
    what the user sets."""
    sections = read_sections(find_recipe(candidate.recipe))
    data = sections["data"]
    model = sections["model"]
    train = sections["train"]
    # those of the recipe are for the classes and the number of images of its own data set
    data.pop("validation_fraction", None)
    train["class_balance"] = "auto"
    # a minute of compiling pays in runs as long as the recipe's
    train["compile"] = "auto"
    if task.pretrained_size is not None:
        data["image_size"] = _shorten(task.pretrained_size)
        # some ten steps an epoch, also of few images
        near_a_tenth = 2 ** round(math.log2(max(task.num_images, 1) / 10))
        train["batch_size"] = min(max(near_a_tenth, 8), train["batch_size"])
        # that of the weights holds
        del data["crop_pct"]
        return sections

    # the power of two near √(2n), as in the recipes: 32 for 576 images, 256 for 45,000, and four
    # times that on GPUs
    train["batch_size"] = max(2 ** round(math.log2(2 * task.num_images) / 2), 8)
    if task.device.type == "cuda":
        train["batch_size"] *= 4

    if _is_small(candidate, task):
        sections["augment"]["cutmix"] = 1.0
        sections["optimizer"]["weight_decay"] = 0.1
    elif candidate.recipe.startswith("imagenette") and task.num_images < 2 * _ENOUGH_PHOTOS:
        model["drop_path_rate"] = 0.1

    # the size and the patches are the preset's then
    if "preset" in task.user["model"]:
        sections["model"] = {}
    else:
        _fit_patches(data, model, candidate.side, task.user)
    smallest = min((fraction for _, fraction in train.get("image_sizes") or ()), default=1)
    if smallest * min(as_pair(data["image_size"], name="data.image_size")) < _MIN_REDUCED_SIDE:
        train["image_sizes"] = None
    return sections


def _is_small(candidate: _Candidate, task: _Task) -> bool:
    return candidate.recipe == "folder/small" and task.num_images < _ENOUGH_PHOTOS


def _fit_patches(data: dict[str, Any], model: dict[str, Any], side: int, user: Sections) -> None:
    """Image and patch size: about as many patches as in the recipe, an image of whole patches."""
    user_size = user["data"].get("image_size")
    height, width = as_pair(user_size or side, name="data.image_size")
    # as many patches on the shorter side as the recipe has
    scale = min(height, width) / data["image_size"]
    ideal_patch = max(model["patch_size"] * scale, 2)
    patch_size = user["model"].get("patch_size")
    if not patch_size:
        sizes = list(range(1, min(height, width) + 1))
        # of a size that is fixed one that divides both sides
        if user_size is not None:
            sizes = [size for size in sizes if math.gcd(height, width) % size == 0]
        # the nearest power of two, or else the nearest
        patch_size = min(
            sizes,
            key=lambda size: (not _is_power_of_two(size), abs(math.log(size / ideal_patch))),
        )

    patch_height, patch_width = as_pair(patch_size, name="model.patch_size")
    rows = max(round(height / patch_height), 1)
    columns = max(round(width / patch_width), 1)
    data["image_size"] = _shorten((rows * patch_height, columns * patch_width))
    model["patch_size"] = patch_size
    # the convolutional stems halve the image until it is the grid of patches
    if not (_is_power_of_two(patch_height) and _is_power_of_two(patch_width)):
        model["stem"] = "patch"


def _is_power_of_two(size: int) -> bool:
    return size > 1 and size & (size - 1) == 0


def _shorten(sides: tuple[int, int]) -> int | list[int]:
    return sides[0] if sides[0] == sides[1] else list(sides)


def _plan_fine_tuning(
    sections: Sections,
    overrides: Sequence[str],
    splits: DatasetSplits,
    task: _Task,
    started_at: float,
) -> tuple[FittedProbe, str]:
    """Fit the probe, and set in `sections` how many of its blocks the rest of the minutes trains for
    how long; returns the probe and the reason."""
    config = load_config(sections, overrides)
    model, pretrained = build_model(config, num_classes=task.num_classes)
    assert isinstance(model, VisionTransformer)
    data = build_data(config, splits, device=task.device, pretrained=pretrained)
    model.to(task.device)
    forward_rate = _measure_forward_rate(model, task)
    max_images = int(_FEATURE_FRACTION * 60 * task.minutes * forward_rate)
    if max_images < _NEARLY_ALL * task.num_images:
        # a wrong measurement mustn't leave too few; another number of images is another run
        sections["model"]["probe"] = max(max_images, _MIN_PROBED_IMAGES)
        config = load_config(sections, overrides)
    probe = fit_to_data(config, model, data, device=task.device)
    if is_probe_alone(config):
        return probe, "the probe alone (given)"

    is_length_given = bool(task.user["train"].keys() & {"epochs", "max_steps"})
    is_asked_for = is_length_given or "freeze" in task.user["model"]
    num_validation = len(data.validation or ())
    if 0 < num_validation < _MIN_VALIDATION_IMAGES and not is_asked_for:
        sections["model"]["freeze"] = "backbone"
        text = f"{num_validation} validation images can't tell whether fine-tuning it would help"
        return probe, f"the probe alone; {text} (--folds 5 fits it on all images)"

    # at the end all images pass through the model once more, for what its file holds of them
    num_described = min(task.num_images, config.train.max_training_features) + num_validation
    deadline = started_at + 60 * task.minutes - num_described / forward_rate
    model = build_probed_model(config, model, probe.probe).to(task.device)
    # few validation images tell few models apart: the best of many would be so by chance
    num_evaluations = max(num_validation // _IMAGES_AN_EVALUATION, 1)
    deadline -= num_evaluations * num_validation / forward_rate
    seconds_left = max(deadline - time.perf_counter(), 0.0)
    num_frozen, epochs = _choose_num_frozen(
        len(model.blocks),
        # the backward pass costs twice the forward
        image_seconds=3 / forward_rate,
        seconds=_FINE_TUNING_FRACTION * seconds_left,
        num_images=task.num_images,
    )
    rate = 0.0
    # tokens and the measurement would take what is left of too little time
    if epochs >= _MIN_FINE_TUNING_EPOCHS or is_length_given:
        if "freeze" in task.user["model"]:
            num_frozen = config.model.freeze if isinstance(config.model.freeze, int) else 0
        tokens = None
        if num_frozen:
            _train_upper_blocks(sections, num_frozen)
            config = load_config(sections, overrides)
            set_up_training(config, model)
            data = replace(data, config=config)
            data, tokens = keep_tokens(config, model, data, device=task.device)
        # as it will run
        rate = _measure_rate(config, task, model, data, tokens)
        seconds_left = max(deadline - time.perf_counter(), 0.0)
        epochs = _FINE_TUNING_FRACTION * seconds_left * rate / task.num_images

    train = sections["train"]
    train["epochs"] = min(max(int(epochs), 1), train["epochs"])
    train["evaluate_every_epochs"] = math.ceil(train["epochs"] / num_evaluations)
    length = f"{task.minutes:g} minutes (--minutes) on this {task.device.type.upper()}"
    if is_length_given:
        return probe, length
    if epochs < _MIN_FINE_TUNING_EPOCHS:
        sections["model"]["freeze"] = "backbone"
        return probe, f"the probe alone; {length} hold {epochs:.1f} epochs of fine-tuning"
    train["max_minutes"] = float(f"{seconds_left / 60:.3g}")
    if num_frozen:
        length += f", with {num_frozen} of {len(model.blocks)} blocks frozen"
    length += f", of which {seconds_left / 60:.1f} are left after the probe"
    return probe, f"{length}, {rate:,.0f} images/s"


def _choose_num_frozen(
    depth: int, *, image_seconds: float, seconds: float, num_images: int
) -> tuple[int, float]:
    """How many blocks stay frozen, that the time holds enough epochs of the others; and how many
    epochs it holds.

    Args:
        depth: blocks of the model.
        image_seconds: in which it is trained on an image as a whole, of which a forward pass takes
            a third.
        seconds: to train in.
        num_images: to train on.
    """
    num_frozen = 0
    epochs = 0.0
    for fraction, min_epochs in _FROZEN_FRACTIONS.items():
        num_frozen = int(fraction * depth)
        share = num_frozen / depth
        # of the images and their mirror images through the frozen blocks
        token_seconds = 2 / 3 * share * num_images * image_seconds
        trained_share = 1 - share
        if num_frozen:
            trained_share *= _DROPPED_COST
        epoch_seconds = trained_share * num_images * image_seconds
        epochs = max(seconds - token_seconds, 0.0) / epoch_seconds
        if epochs >= min_epochs:
            break
    return num_frozen, epochs


def _train_upper_blocks(sections: Sections, num_frozen: int) -> None:
    """Have the others trained on the frozen blocks' tokens of the images, which stay the same; that
    some patches are dropped at random takes the place of crops, and a third of the time."""
    sections["model"]["freeze"] = num_frozen
    sections["augment"] = {"flip": sections["augment"]["flip"]}
    sections["train"]["patch_drop_rates"] = [[1.0, _DROP_RATE]]


def _measure_forward_rate(model: VisionTransformer, task: _Task) -> float:
    """Images that pass through a model in a second, from a few blank ones."""
    images = torch.zeros(_TIMED_IMAGES, 3, *model.patch_embed.img_size, device=task.device)
    precision = choose_precision("auto", task.device)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.inference_mode(), autocast(task.device, precision):
            # reading it waits for the device
            float(model.eval()(images).sum())
        seconds.append(time.perf_counter() - start)
    return _TIMED_IMAGES / min(seconds)


def _measure_rate(
    config: Config,
    task: _Task,
    model: nn.Module | None = None,
    data: TrainingData | None = None,
    tokens: Tensor | None = None,
) -> float:
    """Images that are trained on in a second, over the sizes and the dropped patches of the run.
    The steps train a copy of `model`; None: the configuration's. With `data` they are on its batches,
    whose augmentation counts, or on these of `tokens`."""
    if model is None:
        model, _ = build_model(config, num_classes=task.num_classes)
    # features and tokens were computed in evaluation mode
    model = copy.deepcopy(model).to(task.device).train()
    plan = build_plan(config, model, steps_per_epoch=10, batch_size=config.train.batch_size)
    process = Process()
    if data is not None:
        loader = build_train_loader(data, device=task.device, process=process, tokens=tokens)
        plan = replace(plan, batch_size=loader.batch_size)
    train_step = build_train_step(config, model, plan=plan, process=process, device=task.device)
    image_size = config.data.size
    if data is None:
        step_seconds = time_blank_steps(
            train_step, batch_size=plan.batch_size, image_size=image_size
        )
    else:
        step_seconds = time_steps(train_step, loader)
    # large images and all patches cost more than the small ones that a run may begin with
    seconds = step_seconds * plan.count_full_steps(image_size)
    # free memory decides how the images of the run are kept
    del train_step, model
    free_cached_memory(task.device)
    return plan.batch_size * plan.total_steps / seconds


def _set_length(sections: Sections, task: _Task, epochs: float) -> None:
    """Set the epochs that the minutes hold and that so many images are good for, and what depends
    on these."""
    train = sections["train"]
    max_epochs = train["epochs"]
    if task.pretrained_size is None:
        # about 80 epochs for 600 images: more overfits; recipes are for more images
        epochs_for_images = round(min(80 * (600 / task.num_images) ** 0.5, 150))
        max_epochs = max(epochs_for_images, 2 * max_epochs)
    # so little time is enough for the head alone
    elif epochs < 2:
        sections["model"]["freeze"] = "backbone"

    train["epochs"] = min(max(int(epochs), 1), max_epochs)
    # what the user sets is applied again by `load_config`; what depends on it must know it here
    user_epochs = task.user["train"].get("epochs")
    if user_epochs is not None:
        train["epochs"] = user_epochs
    elif epochs < 1:
        num_steps = int(epochs * task.num_images / train["batch_size"])
        train["max_steps"] = max(num_steps, 1)
    train["evaluate_every_epochs"] = max(train["epochs"] // 16, 1)


def _explain_choices(
    config: Config, task: _Task, candidate: _Candidate, length: str
) -> dict[str, str]:
    """By name, the values that were chosen, and why.

    Args:
        config: what was chosen.
        task: what for.
        candidate: the recipe that it is made of.
        length: why it is so long.
    """
    reasons = dict.fromkeys(_CHOSEN_KEYS, "as in the recipe")
    reasons["image size"] = candidate.size_reason
    reasons["length"] = length
    chosen_keys = dict(_CHOSEN_KEYS)
    if task.pretrained_size is not None:
        # the patches are those of the weights
        chosen_keys["image size"] = ("data.image_size",)
    else:
        reasons["batch"] = f"near √(2 × {task.num_images:,} images)"
        if config.model.drop_path_rate > 0 or _is_small(candidate, task):
            reasons["regularisation"] = (
                f"more than in the recipe for so few as {task.num_images:,} images"
            )
    # then no step follows the probe
    if is_probe_alone(config):
        del chosen_keys["length"], chosen_keys["batch"], chosen_keys["regularisation"]

    choices = {
        "recipe": f"{candidate.recipe}; set augment.flip=none where left and right matter, "
        "as in letters"
    }
    values = flatten_config(config)
    user_keys = {f"{section}.{key}" for section, keys in task.user.items() for key in keys}
    for name, keys in chosen_keys.items():
        text = ", ".join(f"{key.partition('.')[2]}={values[key]}" for key in keys)
        # only where the user set all of them
        is_given = user_keys.issuperset(keys)
        choices[name] = f"{text} ({'given' if is_given else reasons[name]})"
    if is_probe_alone(config):
        choices["length"] = length
    if _is_small(candidate, task):
        choices["pretrained weights"] = f"none; {_PRETRAINED_HINT}"
    return choices
