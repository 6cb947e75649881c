"""How long training takes: seconds of a step, images in a second."""

import copy
import time
from collections.abc import Iterator
from itertools import repeat

import torch
from torch import Tensor, nn

from vit.config import Config
from vit.data.loader import Batch, TrainLoader
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import autocast, choose_precision, free_cached_memory
from vit.runtime.processes import Process
from vit.training.data import TrainingData, build_train_loader
from vit.training.run import build_plan, build_train_step
from vit.training.train_step import TrainStep

_TIMED_STEPS = 3
_LONG_STEP_SECONDS = 2.0
# Images of the timed forward pass.
_TIMED_IMAGES = 16


def measure_training_rate(
    config: Config,
    model: nn.Module,
    *,
    device: torch.device,
    data: TrainingData | None = None,
    tokens: Tensor | None = None,
) -> float:
    """Measure the images trained on in a second, over the image sizes and dropped patches of a run.

    Args:
        config: Configuration of the run.
        model: Model of the run. The steps train a copy.
        device: Device to train on.
        data: Images of the run; their augmentation counts. None: blank images.
        tokens: Tokens that take the place of the images, see `keep_tokens`.
    """
    # features and tokens were computed in evaluation mode
    model = copy.deepcopy(model).to(device).train()
    image_size = config.data.size
    process = Process()
    loader = None
    batch_size = config.train.batch_size
    if data is not None:
        loader = build_train_loader(data, device=device, process=process, tokens=tokens)
        batch_size = loader.batch_size
    plan = build_plan(config, model, steps_per_epoch=10, batch_size=batch_size)
    train_step = build_train_step(config, model, plan=plan, process=process, device=device)
    if loader is None:
        images = torch.zeros(batch_size, 3, *image_size, device=device)
        labels = torch.zeros(batch_size, dtype=torch.int64, device=device)
        step_seconds = _time(train_step, repeat(Batch(images, labels, labels, labels)))
    else:
        step_seconds = time_steps(train_step, loader)
    # Large images and whole images cost more than the small ones that a run may begin with.
    seconds = step_seconds * plan.count_full_steps(image_size)
    # The memory that is free decides how the images of the run are kept.
    del train_step, model
    free_cached_memory(device)
    return batch_size * plan.total_steps / seconds


def measure_forward_rate(model: VisionTransformer, *, device: torch.device) -> float:
    """Measure the images that pass through a model in a second, with a few blank ones."""
    images = torch.zeros(_TIMED_IMAGES, 3, *model.patch_embed.img_size, device=device)
    precision = choose_precision("auto", device)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        with torch.inference_mode(), autocast(device, precision):
            float(model.eval()(images).sum())  # reading it waits for the device
        seconds.append(time.perf_counter() - start)
    return _TIMED_IMAGES / min(seconds)


def time_steps(train_step: TrainStep, loader: TrainLoader) -> float:
    """Measure the seconds of a step and of making its batch, with the first batches. The steps
    train, and the loader is closed."""

    def list_batches() -> Iterator[Batch]:
        # An epoch may be shorter than what is timed.
        for epoch in range(1 + _TIMED_STEPS):
            yield from loader.epoch(epoch)

    try:
        return _time(train_step, list_batches())
    finally:
        loader.close()


def _time(train_step: TrainStep, batches: Iterator[Batch]) -> float:
    seconds: list[float] = []
    while len(seconds) < 1 + _TIMED_STEPS:
        start = time.perf_counter()
        batch = next(batches)
        float(train_step(batch.images, batch.targets).loss)  # reading it waits for the device
        seconds.append(time.perf_counter() - start)
        # A long step varies little, and the user waits for it.
        if len(seconds) == 2 and seconds[-1] > _LONG_STEP_SECONDS:
            break
    # The first step also warms up.
    return min(seconds[1:])
