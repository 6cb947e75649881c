"""The step of every packaged recipe, as it is set up: deterministic where the recipe says so, at each
image size, with patches dropped."""

import pytest
import torch

from tests.recipe_step import RECIPE_NAMES, build, draw_batch, list_sizes, load_recipe
from vit.runtime.device import use_deterministic_algorithms

SHORT = ["model.depth=2", "train.batch_size=8", "train.compile=false"]


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_every_recipe_trains(device: torch.device, name: str) -> None:
    config = load_recipe(name, *SHORT)
    step = build(config, device=device)
    drop_rates = [rate for _, rate in config.train.patch_drop_rates or ()] or [0.0]
    use_deterministic_algorithms(config.train.deterministic and device.type == "cuda")
    try:
        for size in list_sizes(config):
            images, targets = (values.to(device) for values in draw_batch(config, size))
            for rate in drop_rates:
                step.module.patch_drop_rate = rate
                result = step(images, targets)
                assert bool(result.finite)
    finally:
        use_deterministic_algorithms(False)


def test_learned_positions_train_at_several_sizes(device: torch.device) -> None:
    """torch's bicubic interpolation refuses to be differentiated deterministically on a GPU."""
    sizes = "train.image_sizes=[[0.5,0.5],[1,1]]"
    config = load_recipe("cifar10/cpu", *SHORT, sizes, "model.pos_embed=learned")
    step = build(config, device=device)
    use_deterministic_algorithms(device.type == "cuda")
    try:
        for size in list_sizes(config):
            images, targets = (values.to(device) for values in draw_batch(config, size))
            assert bool(step(images, targets).finite)
    finally:
        use_deterministic_algorithms(False)
