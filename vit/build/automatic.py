"""A configuration for images that come without one, chosen from their number and sizes, the device and the minutes.

It starts from a packaged recipe, which is measured, and fits size, batch, length and regularisation to the images. What
the user gives with `key.path=value` holds, and what depends on it follows.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.build.data import build_dataset
from vit.build.recipe import Chosen, find_recipe
from vit.build.run import Pretrained, build_model, build_plan, build_step, find_patch_size
from vit.config import Config, flatten_config, load_config, read_overrides
from vit.data.open import find_kind
from vit.data.statistics import sample_statistics
from vit.runtime.arguments import as_pair
from vit.runtime.device import choose_device
from vit.runtime.documents import parse_yaml
from vit.runtime.files import read_text
from vit.runtime.processes import Process
from vit.training.estimate import choose_grad_accum_steps

DEFAULT_MINUTES = {"cpu": 5.0, "cuda": 20.0}
_TRAINING_FRACTION = 0.75  # of the minutes: the rest is for starting, decoding, augmentation and evaluation
_SAMPLE = 64  # images whose sizes are read
_MEASURED_STEPS = 3
# Fewer photos than these are overfitted by a model of 6 blocks at 128 px: of 4 × 200 of Imagenette's, 75.6 % where 4
# blocks at 64 px gave 80.6 % in a third of the time (2 cores, one seed). Cutmix, weight decay of 0.1 and 80 epochs gave
# 84.7 and 82.4 % on 1,525 and 1,601 other images of two such sets, where 40 epochs without gave 82.4 and 81.1 %.
_ENOUGH_PHOTOS = 3000


@dataclass(frozen=True)
class _Images:
    count: int  # to train on
    num_classes: int
    side: int  # the shorter one, median
    device: torch.device
    minutes: float
    pretrained: Pretrained | None  # to start from


@dataclass(frozen=True)
class _Candidate:
    """A recipe at an image size, taken where the minutes hold at least `epochs` of it."""

    recipe: str
    why: str  # of the size
    side: int = 0
    epochs: int = 0


def choose_config(data: str | Path, overrides: Sequence[str] = (), *, minutes: float | None = None) -> Chosen:
    """The configuration with which `data` is trained on, what was chosen and why, and the data set, opened.
    `data` is what `find_kind` knows. Raises ValueError where it can't be opened, and for overrides that don't fit."""
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes {minutes} must be more than 0")
    given = read_overrides(overrides)
    kind = find_kind(data)
    section = {"name": kind} if kind == str(data) else {"name": kind, "root": str(data)}
    found = build_dataset(load_config({"data": section | given.get("data", {}) | {"image_size": 32}}))
    source, device = found.split("train"), choose_device(str(given.get("train", {}).get("device", "auto")))
    side = round(sample_statistics(source, count=_SAMPLE).median_side)
    num_classes, init, pretrained = len(source.class_names), given.get("model", {}).get("init"), None
    if init:
        from vit.model.timm_weights import load_pretrained

        pretrained = load_pretrained(str(init), img_size=None, num_classes=num_classes)
    minutes = minutes or DEFAULT_MINUTES[device.type]
    images = _Images(len(source), num_classes, side, device, minutes, pretrained)
    for candidate in _list_candidates(images):
        values = _adapt(candidate, images, given)
        values["data"] |= section
        rate = _measure_rate(load_config(values, overrides), images)
        epochs = 60 * images.minutes * _TRAINING_FRACTION * rate / images.count
        if epochs >= candidate.epochs:
            break
    _set_length(values, images, epochs=epochs, given=given)
    config = load_config(values, overrides)
    return Chosen(config, _explain(config, images, candidate, given, rate=rate), found)


def _list_candidates(images: _Images) -> list[_Candidate]:
    """Best first; the last is taken in any case."""
    side, on_gpu = images.side, images.device.type == "cuda"
    if images.pretrained is not None:
        return [_Candidate("folder/finetune", "the size that its weights were trained at")]
    if side <= 48:
        own = "the images' own size"
        if side <= 16:
            return [_Candidate("digits", own, side)]
        if on_gpu:
            return [_Candidate("cifar10/best", own, side, 60), _Candidate("cifar10/speedrun", own, side)]
        return [_Candidate("cifar10/cpu-20-minutes", own, side, 20), _Candidate("cifar10/cpu", own, side)]
    large, small = min(side, 128), min(side, 64)
    if images.count < _ENOUGH_PHOTOS:
        return [_Candidate("folder/small", f"{side} px would be overfitted by {images.count:,} images", small)]
    found = [_Candidate("imagenette/cpu", f"{side} px take more time", large, 12)]
    if on_gpu:
        found.insert(0, _Candidate("imagenette/gpu", f"{side} px take more time", large, 30))
    return [*found, _Candidate("folder/small", f"the minutes are too few for more of {side} px", small)]


def _adapt(candidate: _Candidate, images: _Images, given: dict[str, Any]) -> dict[str, Any]:
    """The candidate's recipe, with a size, patch, batch and regularisation that fit the images and what is given."""
    path = find_recipe(candidate.recipe)
    values: dict[str, Any] = parse_yaml(read_text(path), origin=str(path))
    data, model, train, given_model = values["data"], values["model"], values["train"], given.get("model", {})
    data.pop("validation_fraction", None)
    train["class_balance"] = "auto"
    if images.pretrained is not None:
        data["image_size"] = _shorten(images.pretrained[0].patch_embed.img_size)
        del data["crop_pct"]  # as those weights'
        return values
    # the power of two near √(2n), as in the recipes: 32 for 576 images, 256 for 45,000, and four times that on GPUs
    train["batch_size"] = max(2 ** round(math.log2(2 * images.count) / 2), 8)
    train["batch_size"] *= 4 if images.device.type == "cuda" else 1
    if candidate.recipe == "folder/small" and images.count < _ENOUGH_PHOTOS:
        values["augment"]["cutmix"] = 1.0
        values["optimizer"]["weight_decay"] = 0.1
    elif candidate.recipe.startswith("imagenette") and images.count < 2 * _ENOUGH_PHOTOS:
        model["drop_path_rate"] = 0.1
    if "preset" in given_model:
        values["model"] = {}
        return values
    is_fixed = "image_size" in given.get("data", {})
    sides = as_pair(given["data"]["image_size"] if is_fixed else candidate.side, name="data.image_size")
    wanted = max(model["patch_size"] * min(sides) / data["image_size"], 2)  # so that there are as many patches
    unit = given_model.get("patch_size") or _choose_patch(sides, wanted, is_fixed=is_fixed)
    rows, columns = as_pair(unit, name="model.patch_size")
    data["image_size"] = _shorten((max(round(sides[0] / rows), 1) * rows, max(round(sides[1] / columns), 1) * columns))
    model["patch_size"] = unit
    if any(side < 2 or side & (side - 1) for side in (rows, columns)):
        model["stem"] = "patch"  # the convolutional ones halve the image
    return values


def _choose_patch(sides: tuple[int, int], wanted: float, *, is_fixed: bool) -> int:
    """The power of two that is nearest to `wanted`; of sides that are fixed one that divides both, or else the nearest
    divisor."""
    divisors = [unit for unit in range(1, min(sides) + 1) if not is_fixed or math.gcd(*sides) % unit == 0]
    powers = [unit for unit in divisors if unit & (unit - 1) == 0 and unit > 1]
    return min(powers or divisors, key=lambda unit: abs(math.log(unit / wanted)))


def _shorten(sides: tuple[int, int]) -> int | list[int]:
    return sides[0] if sides[0] == sides[1] else list(sides)


def _measure_rate(config: Config, images: _Images) -> float:
    """Images that are trained on in a second, over the sizes and the dropped patches of the run."""
    model, _ = build_model(config, num_classes=images.num_classes, pretrained=images.pretrained)
    model.to(images.device)
    size, batch_size = as_pair(config.data.image_size, name="data.image_size"), config.train.batch_size
    plan = build_plan(config, steps_per_epoch=10, batch_size=batch_size, patch_size=find_patch_size(model))
    shape: dict[str, Any] = {"batch_size": batch_size, "image_size": size}
    pieces = choose_grad_accum_steps(model, device=images.device, **shape)
    more: dict[str, Any] = {"process": Process(), "device": images.device, "grad_accum_steps": pieces}
    step = build_step(config, model, plan=plan, **more)
    batch = torch.zeros(batch_size, 3, *size, device=images.device)
    seconds = []
    for _ in range(1 + _MEASURED_STEPS):  # the first one also warms up
        start = time.perf_counter()
        float(step(batch, torch.zeros(batch_size, dtype=torch.int64, device=images.device)).loss)
        seconds.append(time.perf_counter() - start)
    work = sum(plan.relative_work(epoch, size) for epoch in range(plan.epochs))
    return batch_size * plan.epochs / (min(seconds[1:]) * work)


def _set_length(values: dict[str, Any], images: _Images, *, epochs: float, given: dict[str, Any]) -> None:
    """Epochs that the minutes hold and that so many images are good for, and what depends on these."""
    train, is_given = values["train"], "epochs" in given.get("train", {})
    usual, is_finetuned = train["epochs"], bool(given.get("model", {}).get("init"))
    # about 80 epochs for 600 images: more overfits; recipes are for more images
    most = usual if is_finetuned else max(round(min(80 * (600 / images.count) ** 0.5, 150)), 2 * usual)
    train["epochs"] = given["train"]["epochs"] if is_given else min(max(int(epochs), 1), most)
    if epochs < 1 and not is_given:
        train["max_steps"] = max(int(epochs * images.count / train["batch_size"]), 1)
    if is_finetuned and epochs < 2:
        values["model"]["freeze"] = "backbone"
    train["evaluate_every_epochs"] = max(train["epochs"] // 16, 1)


def _explain(
    config: Config, images: _Images, candidate: _Candidate, given: dict[str, Any], *, rate: float
) -> dict[str, str]:
    """By name, the values that were chosen, and why."""
    recipe, init = f"as in the recipe {candidate.recipe}", config.model.init
    held = images.minutes * 60 * _TRAINING_FRACTION * rate / images.count
    minutes = f"{images.minutes:g} minutes (--minutes) on this {images.device.type.upper()}, {rate:,.0f} images/s"
    enough = f"enough for {images.count:,} images; {minutes}, hold {held:,.0f}"
    is_small = candidate.recipe == "folder/small" and images.count < _ENOUGH_PHOTOS
    is_regularised = config.model.drop_path_rate > 0 or is_small
    chosen = {
        "image size": (("data.image_size", "model.patch_size"), candidate.why),
        "architecture": (("model.stem", "model.embed_dim", "model.depth"), recipe),
        "length": (("train.epochs",), enough if config.train.epochs < int(held) else f"{minutes}"),
        "batch": (("train.batch_size",), recipe if init else f"near √(2 × {images.count:,} images)"),
        "augmentation": (
            ("augment.resized_crop_scale", "augment.crop_padding", "augment.flip", "augment.mixup", "augment.cutmix"),
            f"{recipe}; set augment.flip=none where left and right matter, as in letters",
        ),
        "regularisation": (
            ("train.label_smoothing", "optimizer.weight_decay", "model.drop_path_rate"),
            f"more than in the recipe for so few as {images.count:,} images" if is_regularised else recipe,
        ),
        "learning rate": (("optimizer.name", "optimizer.lr", "optimizer.muon_lr", "schedule.name"), recipe),
    }
    if init:
        chosen["image size"] = (("data.image_size",), candidate.why)
        chosen["architecture"] = (("model.init", "model.freeze"), "its weights are the start")
        chosen["learning rate"] = (("optimizer.lr", "optimizer.layer_decay"), f"{recipe}: lower for lower layers")
    elif config.model.preset:
        chosen["architecture"] = (("model.preset",), recipe)
    settings, facts = flatten_config(config), {}
    for name, (keys, reason) in chosen.items():
        values = ", ".join(f"{key.partition('.')[2]}={settings[key]}" for key in keys if settings[key] is not None)
        ours = [key for key in keys if key.partition(".")[2] in given.get(key.partition(".")[0], {})]
        facts[name] = f"{values} ({reason})" if len(ours) < len(keys) else f"{values} (given)"
    return facts
