"""The training step of a packaged recipe, as `vit train` builds it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    model, _ = build_model(config, num_classes=count_classes(config))
    model.to(device).train()
    options: dict[str, Any] = {
        "plan": build_run_plan(config, model),
        "device": torch.device(device),
    }
    loss = build_loss(label_smoothing=config.train.label_smoothing)
    return build_train_step(config, model, loss=loss, **options)


def build_run_plan(config: Config, model: Any = None) -> TrainingPlan:
    """How long the recipe's run is, on the images that it is for."""
    model = model or build_model(config, num_classes=count_classes(config))[0]
    images = int(IMAGES[config.data.name] * (1 - config.data.validation_fraction))
    sizes = {
        "steps_per_epoch": max(images // config.train.batch_size, 1),
        "batch_size": config.train.batch_size,
    }
    return build_plan(config, model, **sizes)


def list_sizes(config: Config) -> list[tuple[int, int]]:
    """The image sizes (height, width) of the recipe's run."""
    model, _ = build_model(config, num_classes=count_classes(config))
    sizes = build_run_plan(config, model).image_sizes
    return [size for _, size in sizes] if sizes else [model.patch_embed.img_size]


def draw_batch(config: Config, size: tuple[int, int], *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random images [B, 3, height, width] and targets: classes, or probabilities where the recipe
    mixes images."""
    generator = torch.Generator().manual_seed(seed)
    count, classes = config.train.batch_size, count_classes(config)
    images = torch.randn(count, 3, *size, generator=generator)
    if config.augment.mixup or config.augment.cutmix:
        return images, torch.rand(count, classes, generator=generator).softmax(dim=1)
    return images, torch.randint(classes, (count,), generator=generator)
