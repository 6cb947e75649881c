"""A configuration for images that come without one, by nine rules.

`choose_recipe` says which recipe is taken when, and why: by the side and the number of the images,
their colours, the device and the minutes. The recipe's size, batch and length are fitted to the images.
What the user sets with `key.path=value` holds, and what depends on it follows. Nothing is timed
here: the run itself ends when its minutes do (train.max_minutes).
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

from vit.config import Config, Overrides, list_overrides, load_config, read_sections
from vit.data.open import find_kind
from vit.data.splits import DatasetSplits
from vit.data.statistics import measure_sample
from vit.runtime.arguments import as_pair
from vit.runtime.device import choose_device
from vit.training.data import build_dataset
from vit.training.recipe import find_recipe

# section → key → value, not yet validated
Sections = dict[str, dict[str, Any]]

DEFAULT_MINUTES = {"cpu": 5.0, "mps": 5.0, "cuda": 20.0}
# Images whose sizes are read.
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
# With fewer validation images nothing follows the probe: with ten, fine-tuning was right on one more
# of these, and on 2 in 100 fewer of 240 unseen ones.
_MIN_VALIDATION_IMAGES = 20
# One evaluation per this many validation images: with more, the best is best by chance.
_IMAGES_AN_EVALUATION = 100
_PRETRAINED_HINT = (
    "none; so few photos are mostly classified better from pretrained weights "
    "(a ViT-S, 10 classes of 30 photos: 86 % right, from scratch 57 %); "
    "--init timm:vit_small_patch16_224 starts from some (a download of 88 MB, Apache-2.0, once)"
)


class Choice(NamedTuple):
    """A configuration that was chosen for images, the values that were chosen, with their reasons,
    by name, and the images, opened."""

    config: Config
    reasons: dict[str, str]
    splits: DatasetSplits


def choose_config(
    data: str | Path, overrides: Overrides = (), minutes: float | None = None
) -> Choice:
    """Choose a configuration for images.

    Args:
        data: A data set's name, a folder, a table or shards. See
            `vit.data.open.find_kind`.
        overrides: Changes of the user. See `vit.config.list_overrides`.
        minutes: Minutes of training; None for `DEFAULT_MINUTES`.

    Raises:
        ValueError: The images can't be opened, or the overrides don't fit.
    """
    given = list_overrides(overrides)
    kind = find_kind(data)
    source: dict[str, Any] = {"name": kind}
    # A user's photos often are bursts, or were saved twice.
    if kind == "folder":
        source["group_duplicates"] = True
    if kind != str(data):
        source["root"] = str(data)
    # Listing needs no image size: 32 only fills the place of the size that is chosen later.
    own = {key: value for key, value in given.items() if key.startswith("data.")}
    splits = build_dataset(load_config({"data": source}, own | {"data.image_size": 32}))
    images = splits.split("train")

    num_images = len(images)
    shorter_side, is_grey = measure_sample(images, count=_SAMPLE)
    side = round(shorter_side)
    device = choose_device(str(given.get("train.device", "auto"))).type
    minutes = minutes or DEFAULT_MINUTES[device]
    starts_from_weights = bool(given.get("model.init"))
    recipe, reason = "folder/finetune", "that of the weights"
    if not starts_from_weights:
        recipe, reason = choose_recipe(num_images, side, is_grey, device, minutes)
    sections: Sections = read_sections(find_recipe(recipe))
    # The fraction is for the recipe's own data set.
    sections["data"].pop("validation_fraction", None)
    sections["data"] |= source
    sections["train"]["class_balance"] = "auto"
    reasons = {
        "recipe": f"{recipe}; set augment.flip=none where left and right matter, as in letters"
    }
    if starts_from_weights:
        # Computing the features of many images would take all minutes of a CPU.
        affordable = int(_PROBED_IMAGES_A_MINUTE * minutes)
        if device == "cpu" and affordable < 0.75 * num_images:
            sections["model"]["probe"] = max(affordable, 200)
        num_validation = 0
        if given.get("data.validation_fraction") != 0:
            num_validation = len(splits.split("validation"))
        reasons |= _fit_weights(sections, given, num_images, num_validation)
    else:
        largest = {"imagenette/cpu": 128, "folder/small": 64}.get(recipe, _MAX_SMALL_SIDE)
        _fit_images(sections, given, num_images, min(side, largest), device)
        if recipe == "imagenette/cpu" and num_images < 2 * _ENOUGH_PHOTOS:
            sections["model"]["drop_path_rate"] = 0.1  # the recipe has more images
        if recipe == "folder/small":
            # 84.7 and 82.4 % on unseen images of two sets of 4 × 200 photos, where the recipe alone
            # gave 82.4 and 81.1 %
            sections["augment"]["cutmix"] = 1.0
            sections["optimizer"]["weight_decay"] = 0.1
    # The user's own length holds.
    if not given.keys() & {"train.epochs", "train.max_steps"}:
        sections["train"]["max_minutes"] = minutes
        reasons["time"] = f"at most {minutes:g} minutes (--minutes) on this {device.upper()}"
    config = load_config(sections, overrides)
    if "data.image_size" not in given:
        reasons["image size"] = f"{config.data.image_size or 'auto'} ({reason})"
    if recipe == "folder/small" and num_images < _ENOUGH_PHOTOS:
        reasons["pretrained weights"] = _PRETRAINED_HINT
    return Choice(config, reasons, splits)


def choose_recipe(
    num_images: int, side: int, is_grey: bool, device: str, minutes: float
) -> tuple[str, str]:
    """Choose the recipe for a new model on images of this number and shorter side, in pixels.
    Returns its name and the reason of the image size."""

    def holds(epochs: int, images_a_minute: int) -> bool:
        """Return whether the minutes hold some epochs. A GPU's always do."""
        return device == "cuda" or num_images * epochs <= images_a_minute * minutes

    is_small = side <= _MAX_SMALL_SIDE
    is_slow = is_small and not holds(20, _SMALL_IMAGES_A_MINUTE)
    # Images without colours are often drawn, scanned or centred: crops cost accuracy in few epochs.
    is_drawn = is_small and is_grey
    own = "the images' own size"
    # condition, recipe, reason; the first row whose condition holds
    rules = (
        (side <= 16, "digits", own),
        (is_small and device == "cuda", "cifar10/speedrun", own),
        (is_drawn and holds(10, _SMALL_IMAGES_A_MINUTE), "fashion_mnist/cpu-20-minutes", own),
        (is_drawn, "fashion_mnist/cpu", own),
        (is_slow, "cifar10/cpu", own),
        (is_small, "cifar10/cpu-20-minutes", own),
        (
            num_images >= _ENOUGH_PHOTOS and holds(12, _PHOTOS_A_MINUTE),
            "imagenette/cpu",
            "more pixels take more time",
        ),
        (True, "folder/small", "too few images, or minutes too short, for more pixels"),
    )
    return next((recipe, reason) for holds_here, recipe, reason in rules if holds_here)


def _fit_images(
    sections: Sections, given: dict[str, Any], num_images: int, side: int, device: str
) -> None:
    """Fit batch, length and size, of about `side` pixels, to images that a new model is trained
    on."""
    data, train, model = sections["data"], sections["train"], sections["model"]
    # The power of two near √(2n), as in the recipes: 32 for 576 images, 256 for 45,000. Four times
    # that on GPUs.
    train["batch_size"] = max(2 ** round(math.log2(2 * num_images) / 2), 8)
    if device == "cuda":
        train["batch_size"] *= 4
    # About 80 epochs for 600 images: more overfits. Recipes are for more images.
    epochs = round(min(80 * (600 / num_images) ** 0.5, 150))
    train["epochs"] = given.get("train.epochs") or max(epochs, 2 * train["epochs"])
    train["evaluate_every_epochs"] = max(train["epochs"] // 16, 1)
    # A preset has a size and patches of its own.
    if "model.preset" in given:
        sections["model"] = {}
    else:
        # About as many patches as in the recipe, of a power of two, in an image of whole patches.
        size = given.get("data.image_size") or side
        shorter = min(as_pair(size, name="data.image_size"))
        ideal = max(model["patch_size"] * shorter / data["image_size"], 2)
        patch_size = given.get("model.patch_size") or 2 ** round(math.log2(ideal))
        if "data.image_size" not in given:
            patch = max(as_pair(patch_size, name="model.patch_size"))
            size = max(round(size / patch), 1) * patch
        data["image_size"] = size
        model["patch_size"] = patch_size
    smallest = min((scale for _, scale in train.get("image_sizes") or ()), default=1)
    if smallest * min(as_pair(data["image_size"], name="data.image_size")) < _MIN_REDUCED_SIDE:
        train["image_sizes"] = None


def _fit_weights(
    sections: Sections, given: dict[str, Any], num_images: int, num_validation: int
) -> dict[str, str]:
    """Fit batch and length of the recipe to images on which pretrained weights are trained further.
    Returns the reason where nothing is trained after the probe."""
    data, train = sections["data"], sections["train"]
    # The weights have a size and a crop of their own.
    data["image_size"] = None
    del data["crop_pct"]
    # about ten steps an epoch, also with few images
    near_a_tenth = 2 ** round(math.log2(max(num_images, 1) / 10))
    train["batch_size"] = min(max(near_a_tenth, 8), train["batch_size"])
    train["epochs"] = given.get("train.epochs") or train["epochs"]
    num_evaluations = max(num_validation // _IMAGES_AN_EVALUATION, 1)
    train["evaluate_every_epochs"] = math.ceil(train["epochs"] / num_evaluations)
    freeze = given.get("model.freeze")
    if isinstance(freeze, int):
        # The tokens of frozen blocks are computed once. Dropping random patches takes the place of
        # crops.
        sections["augment"] = {"flip": sections["augment"]["flip"]}
        train["patch_drop_rates"] = [[1.0, 0.5]]
    is_asked_for = given.keys() & {"model.freeze", "train.epochs", "train.max_steps"}
    if is_asked_for or not 0 < num_validation < _MIN_VALIDATION_IMAGES:
        return {}
    sections["model"]["freeze"] = "backbone"
    return {
        "length": f"linear probe only; {num_validation} validation images can't tell whether"
        " fine-tuning it would help (--folds 5 fits it on all images)"
    }
