"""The training step of a packaged recipe, as `vit train` builds it: on a device, or on tensors
without memory."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vit.config import Config, load_config
from vit.training.losses import build_loss
from vit.training.model import build_model
from vit.training.plan import TrainingPlan
from vit.training.recipe import find_recipe
from vit.training.run import build_plan, build_train_step
from vit.training.train_step import TrainStep

CONFIGS = Path(__file__).parents[1] / "configs"
# Every packaged recipe.
RECIPE_NAMES = sorted(
    str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yaml")
)

# weights are downloaded, and the architecture is timm's
NO_DOWNLOAD = {
    "folder/finetune": [
        "model.init=null",
        "model.patch_size=16",
        "model.embed_dim=384",
        "model.num_heads=6",
    ]
}
IMAGES = {
    "cifar10": 50_000,
    "cifar100": 50_000,
    "digits": 1_438,
    "fashion_mnist": 60_000,
    "imagenette": 9_469,
    "folder": 9_469,
}


def load_recipe(name: str, *overrides: str) -> Config:
    """The packaged recipe of that name."""
    return load_config(find_recipe(name), [*NO_DOWNLOAD.get(name, ()), *overrides])


def count_classes(config: Config) -> int:
    return 100 if config.data.name == "cifar100" else 10


def build(config: Config, *, device: str | torch.device = "cpu") -> TrainStep:
    """The recipe's step."""
    # the whole batch at once, and torch's operations as they are
    train = config.train.model_copy(update={"grad_accum_steps": 1, "compile": False})
    config = config.model_copy(update={"train": train})
    model, _ = build_model(config, class_names=[""] * count_classes(config))
    model.to(device).train()
    options: dict[str, Any] = {
        "plan": build_run_plan(config, model),
        "device": torch.device(device),
    }
    loss = build_loss(label_smoothing=config.train.label_smoothing)
    return build_train_step(config, model, loss=loss, **options)


def build_run_plan(config: Config, model: Any = None) -> TrainingPlan:
    """How long the recipe's run is, on the images that it is for."""
    model = model or build_model(config, class_names=[""] * count_classes(config))[0]
    images = int(IMAGES[config.data.name] * (1 - config.data.validation_fraction))
    sizes = {
        "steps_per_epoch": max(images // config.train.batch_size, 1),
        "batch_size": config.train.batch_size,
    }
    return build_plan(config, model, **sizes)


def list_sizes(config: Config) -> list[tuple[float, tuple[int, int]]]:
    """The image sizes (height, width) of the recipe's run, each with the fraction of the epochs
    that it is for."""
    model, _ = build_model(config, class_names=[""] * count_classes(config))
    sizes = build_run_plan(config, model).image_sizes or ((1.0, model.patch_embed.img_size),)
    starts = [0.0, *(until for until, _ in sizes)]
    return [(until - start, size) for start, (until, size) in zip(starts, sizes, strict=False)]


def draw_batch(config: Config, size: tuple[int, int], *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random images [B, 3, height, width] and targets: classes, or probabilities where the recipe
    mixes images."""
    generator = torch.Generator().manual_seed(seed)
    count, classes = config.train.batch_size, count_classes(config)
    images = torch.randn(count, 3, *size, generator=generator)
    if config.augment.mixup or config.augment.cutmix:
        return images, torch.rand(count, classes, generator=generator).softmax(dim=1)
    return images, torch.randint(classes, (count,), generator=generator)


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors have shapes and no values. They are the CPU's: for CUDA's, torch's backward pass asks
    for a device. What the code does on a CPU alone is left out; drawing a truncated normal
    distribution looks at values, and modules can't be moved, nor need they."""
    with (
        patch("vit.model.attention.choose_backend", lambda *_: "fused"),
        patch("vit.optim.muon._BATCHED_WIDTH", math.inf),
        patch("torch.nn.init.trunc_normal_", lambda tensor, **_: tensor),
        patch.object(torch.nn.Module, "to", lambda module, *_: module),
        patch.object(
            FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True
        ),  # of the weights' average
        warnings.catch_warnings(
            action="ignore", category=UserWarning
        ),  # of copies, that there is no memory
        FakeTensorMode(),
    ):
        yield
