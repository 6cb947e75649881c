"""A configuration for images that come without one.

A recipe is taken by the side and the number of the images, their colours, the device and the
minutes, and its size, batch and length are fitted to the images. What the user sets with
`key.path=value` holds, and what depends on it follows. The run ends when its minutes do.
"""

import math
from pathlib import Path
from typing import Any

from vit.config import Config, Overrides, list_overrides, load_config
from vit.data.mirrors import find_mirrored_classes
from vit.data.open import find_kind
from vit.data.splits import DatasetSplits
from vit.data.statistics import choose_class_balance, measure_sample
from vit.runtime.arguments import as_pair
from vit.runtime.device import choose_device
from vit.training.data import build_dataset
from vit.training.default_weights import choose_weights
from vit.training.image_size import choose_image_size
from vit.training.recipe import find_recipe

# key.path → value
Values = dict[str, Any]

DEFAULT_MINUTES = {"cpu": 5.0, "mps": 5.0, "cuda": 20.0}
# images whose sizes are read
_SAMPLE = 64
# Pixels up to which images are trained at their own size.
_MAX_SMALL_SIDE = 48
# Smaller images lose what tells their class: Fashion-MNIST had 92.1 % with 20 px until 60 % of the
# run, and 92.7 % at its 28 px.
_MIN_REDUCED_SIDE = 24
# Fewer photos than these are overfitted by a model of 6 blocks at 128 px: 75.6 % on 4 × 200 photos
# of Imagenette, where 4 blocks at 64 px had 80.6 % (one seed).
_ENOUGH_PHOTOS = 3000
# Images of a minute in which a CPU of 2 cores trains the recipes of 20 minutes, and imagenette/cpu.
_SMALL_IMAGES_A_MINUTE = 69_000
_PHOTOS_A_MINUTE = 13_000
# Images whose features a CPU of 2 cores computes in half of a minute, of a ViT-S at 224 px.
_PROBED_IMAGES_A_MINUTE = 600
# With fewer validation images nothing follows the probe: with ten, fine-tuning was right on one
# more of these, and on 2 in 100 fewer of 240 unseen ones.
_MIN_VALIDATION_IMAGES = 20
# Photos up to which pretrained weights are taken where the user names none.
_MAX_PHOTOS = 30_000
# Keys with which a user asks for no model of another kind.
_KEYS_OF_WEIGHTS = {"model.probe", "model.freeze", "model.drop_path_rate"}
# One evaluation per this many validation images: with more, the best is best by chance.
_IMAGES_AN_EVALUATION = 100


def choose_config(
    data: str | Path, overrides: Overrides = ()
) -> tuple[Config, dict[str, str], DatasetSplits]:
    """Choose a configuration for the images of a data set's name, a folder, a table or shards, with
    the changes of the user. Returns it, reasons of its values by name, and the images."""
    given = list_overrides(overrides)
    kind = find_kind(data)
    chosen: Values = {"data.name": kind}
    # A user's photos often are bursts, or were saved twice.
    if kind == "folder":
        chosen["data.group_duplicates"] = True
    if kind != str(data):
        chosen["data.root"] = str(data)
    # The user's own values are checked before anything is computed with them. 32 only fills the
    # place of the size that is chosen later.
    training = {key: value for key, value in given.items() if key.startswith("train.")}
    own = {key: value for key, value in given.items() if key.startswith("data.")}
    first = load_config(None, chosen | own | training | {"data.image_size": 32})
    splits = build_dataset(first)
    images = splits.split("train")
    num_images = len(images)
    side, is_grey = measure_sample(images, count=_SAMPLE)
    device = choose_device(first.train.device).type
    minutes = first.train.max_minutes or DEFAULT_MINUTES[device]
    # The fraction of a recipe is for its own data set.
    chosen["data.validation_fraction"] = first.data.validation_fraction
    chosen["train.class_balance"] = "auto"
    reasons = {}
    if not images.is_multilabel and choose_class_balance(images.labels, wanted="auto") != "none":
        chosen["train.select_by"] = "macro_f1"
        reasons["best model"] = "by macro F1: all classes count alike"
    # The user's own model or weights hold.
    asks_for_model = any(key.startswith("model.") for key in given.keys() - _KEYS_OF_WEIGHTS)
    if not asks_for_model and side > _MAX_SMALL_SIDE and num_images <= _MAX_PHOTOS:
        weights, reasons["weights"] = choose_weights(given.get("data.image_size"))
        chosen |= weights
    has_weights = bool((chosen | given).get("model.init"))
    name, largest, reason = "folder/finetune", side, ""
    if not has_weights:
        name, largest, reason = _choose_recipe(
            num_images=num_images, side=side, is_grey=is_grey, device=device, minutes=minutes
        )
    recipe = load_config(find_recipe(name), training)
    if has_weights:
        # Computing the features of many images would take all minutes of a CPU.
        affordable = int(_PROBED_IMAGES_A_MINUTE * minutes)
        if device == "cpu" and affordable < 0.75 * num_images:
            chosen["model.probe"] = max(affordable, 200)
        num_validation = 0
        if first.data.validation_fraction > 0:
            num_validation = len(splits.split("validation"))
        chosen = _fit_weights(recipe, given, num_images, num_validation) | chosen
        if "model.freeze" in chosen:
            reasons["run"] = (
                f"linear probe only: {num_validation} validation images can't tell whether"
                " fine-tuning helps (--folds 5 fits it on all images)"
            )
        if "data.image_size" not in given:
            larger, reason = choose_image_size(
                chosen | given, splits, side=side, minutes=minutes, device=device
            )
            chosen |= larger
    else:
        chosen |= _fit_images(recipe, given, num_images, min(side, largest), device)
        if name == "imagenette/cpu" and num_images < 2 * _ENOUGH_PHOTOS:
            chosen["model.drop_path_rate"] = 0.1  # the recipe has more images
        if name == "folder/small":
            # 84.7 and 82.4 % on unseen images of two sets of 4 × 200 photos, where the recipe alone
            # gave 82.4 and 81.1 %
            chosen |= {"augment.cutmix": 1.0, "optimizer.weight_decay": 0.1}
    reasons["recipe"] = f"{name}; set augment.flip=none where left and right matter"
    flips = given.get("augment.flip") is None and recipe.augment.flip != "none"
    if flips and (pair := find_mirrored_classes(images)):
        chosen["augment.flip"] = "none"
        reasons["recipe"] = f"{name}; no flips: mirrored, {pair[0]!r} looks like {pair[1]!r}"
    # The user's own length holds.
    if not given.keys() & {"train.epochs", "train.max_steps"}:
        chosen["train.max_minutes"] = minutes
    config = load_config(find_recipe(name), chosen | given)
    if config.train.max_minutes is not None:
        reasons["time"] = f"at most {minutes:g} minutes (--minutes) on this {device.upper()}"
    if "data.image_size" not in given:
        size = config.data.image_size
        reasons["image size"] = f"{size or 'auto'} ({reason})"
        if isinstance(size, int) and side >= 2 * size:
            left = 8 * size / side
            reasons["image size"] += f"; 8 px of a photo of {side} px become {left:.1f} px"
    return config, reasons, splits


def _choose_recipe(
    *, num_images: int, side: int, is_grey: bool, device: str, minutes: float
) -> tuple[str, int, str]:
    """Choose the recipe for images of this number and shorter side, in pixels. Returns its name,
    the largest side that it trains on, and the reason of the side."""
    if device == "cuda":
        minutes = math.inf  # they hold any recipe
    small_epochs = _SMALL_IMAGES_A_MINUTE * minutes / num_images
    photo_epochs = _PHOTOS_A_MINUTE * minutes / num_images
    is_small = side <= _MAX_SMALL_SIDE
    # Images without colours are often drawn, scanned or centred: crops cost accuracy in few epochs.
    is_drawn = is_small and is_grey
    is_larger = num_images >= _ENOUGH_PHOTOS and photo_epochs >= 12
    own = (_MAX_SMALL_SIDE, "the images' own size")
    # condition, recipe, largest side, reason; the first row whose condition holds
    rules: tuple[tuple[bool, str, int, str], ...] = (
        (side <= 16, "digits", *own),
        (is_small and device == "cuda", "cifar10/speedrun", *own),
        (is_drawn and small_epochs >= 10, "fashion_mnist/cpu-20-minutes", *own),
        (is_drawn, "fashion_mnist/cpu", *own),
        (is_small and small_epochs < 20, "cifar10/cpu", *own),
        (is_small, "cifar10/cpu-20-minutes", *own),
        (is_larger, "imagenette/cpu", 128, "more pixels take more time"),
        (True, "folder/small", 64, "too few images, or minutes too short, for more pixels"),
    )
    return next(rule[1:] for rule in rules if rule[0])


def _fit_images(recipe: Config, given: Values, num_images: int, side: int, device: str) -> Values:
    """Fit batch, length and size, about `side`, to images that a new model is trained on."""
    # The power of two near √(2n), as in the recipes: 32 for 576 images, 256 for 45,000. Four times
    # that on GPUs.
    batch_size = max(2 ** round(math.log2(2 * num_images) / 2), 8)
    if device == "cuda":
        batch_size *= 4
    # About 80 epochs for 600 images: more overfits. Recipes are for more images.
    epochs = recipe.train.epochs
    if "train.epochs" not in given:
        epochs = max(round(min(80 * (600 / num_images) ** 0.5, 150)), 2 * epochs)
    # About as many patches as in the recipe, of a power of two, in an image of whole patches.
    size = given.get("data.image_size") or side
    shorter = min(as_pair(size, name="data.image_size"))
    patch, _ = as_pair(recipe.model.patch_size, name="model.patch_size")
    ideal = max(patch * shorter / recipe.data.size[0], 2)
    patch_size = given.get("model.patch_size") or 2 ** round(math.log2(ideal))
    if "data.image_size" not in given:
        patch = max(as_pair(patch_size, name="model.patch_size"))
        size = max(round(size / patch), 1) * patch
    fitted = {
        "train.batch_size": batch_size,
        "train.epochs": epochs,
        "train.evaluate_every_epochs": max(epochs // 16, 1),
        "data.image_size": size,
        "model.patch_size": patch_size,
    }
    smallest = min((scale for _, scale in recipe.train.image_sizes or ()), default=1)
    if smallest * min(as_pair(size, name="data.image_size")) < _MIN_REDUCED_SIDE:
        fitted["train.image_sizes"] = None
    return fitted


def _fit_weights(recipe: Config, given: Values, num_images: int, num_validation: int) -> Values:
    """Fit batch and length to images on which pretrained weights are trained further."""
    # about ten steps an epoch, also with few images
    near_a_tenth = 2 ** round(math.log2(max(num_images, 1) / 10))
    num_evaluations = max(num_validation // _IMAGES_AN_EVALUATION, 1)
    fitted = {
        # The weights have a size and a crop of their own.
        "data.image_size": None,
        "data.crop_pct": None,
        "train.batch_size": min(max(near_a_tenth, 8), recipe.train.batch_size),
        "train.evaluate_every_epochs": math.ceil(recipe.train.epochs / num_evaluations),
    }
    if isinstance(given.get("model.freeze"), int):
        # The tokens of frozen blocks are computed once. Dropping random patches takes the place of
        # crops.
        fitted |= {"augment.resized_crop_scale": None, "augment.color_jitter": 0.0}
        fitted["train.patch_drop_rates"] = [[1.0, 0.5]]
    is_asked_for = given.keys() & {"model.freeze", "train.epochs", "train.max_steps"}
    if 0 < num_validation < _MIN_VALIDATION_IMAGES and not is_asked_for:
        fitted["model.freeze"] = "backbone"
    return fitted
