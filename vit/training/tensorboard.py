"""TensorBoard's view of a run: its curves, its configuration and the first training images."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.data.loader import TrainLoader
from vit.runtime.files import write_atomically
from vit.training.observers import LOG_EVERY_STEPS, Observer

# Images of the first batch that are shown.
_BATCH_IMAGES = 64


class TensorBoard(Observer):
    """Writes for TensorBoard, into the folder `tensorboard` of a run. The curves of a resumed run go
    on from its checkpoint. The first images of `loader` are shown, if there is one."""

    def __init__(self, run_directory: Path, loader: TrainLoader | None = None) -> None:
        self.directory = run_directory / "tensorboard"
        self.loader = loader
        self.writer: Any = None  # a SummaryWriter; torch's types lack half of it

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        # takes a second to import
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None
        if step:
            # Lines that a killed process logged after its last checkpoint are replaced.
            purge_step = step + 1
            # Files are read in the order of their names, which begin with the second.
            time.sleep(1)
        self.writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        text = "\n".join(f"    {key}: {value}" for key, value in settings.items())
        self.writer.add_text("configuration", text, step)
        if step == 0 and self.loader is not None:
            self.writer.add_images("train/augmented", _load_first_images(self.loader), 0)
        self.writer.flush()

    def on_step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] % LOG_EVERY_STEPS == 0:
            for name in ("loss", "gradient_norm", "learning_rate"):
                self.writer.add_scalar(f"step/{name}", float(metrics[name]), metrics["step"])

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        for key, value in metrics.items():
            if key not in ("epoch", "step") and value is not None:
                self.writer.add_scalar(f"epoch/{key}", value, metrics["step"])
        self.writer.flush()

    def on_end(self) -> None:
        if self.writer is not None:
            self.writer.close()


def save_first_images(loader: TrainLoader, path: Path) -> None:
    """Write the first training images as one picture, a PNG."""
    # a second to import
    from torchvision.utils import save_image

    images = _load_first_images(loader)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: save_image(images, file, format="png", nrow=8))


def _load_first_images(loader: TrainLoader) -> Float[Tensor, "B 3 H W"]:
    """Return the first training images as the model gets them, augmented, as colours from 0 to
    1."""
    batch = next(iter(loader.epoch(0)))
    images = batch.images[:_BATCH_IMAGES].float().cpu()
    mean = torch.tensor(loader.preprocess.mean).view(3, 1, 1)
    std = torch.tensor(loader.preprocess.std).view(3, 1, 1)
    return (images * std + mean).clamp(0, 1)
