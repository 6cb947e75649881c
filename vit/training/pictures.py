"""What TensorBoard shows of a run beside its curves: the first batch and the last confusion matrix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.data.loader import TrainLoader
from vit.evaluation.confusion import plot_confusion
from vit.runtime.files import write_atomically
from vit.training.observers import TensorBoard
from vit.training.validation import ImageValidator

_BATCH_IMAGES = 64  # of the first batch, that are shown


class TensorBoardWithPictures(TensorBoard):
    """TensorBoard's curves and pictures of a run.

    Args:
        directory: of the run.
        loader: of its training batches.
        validator: has the scores of the last evaluation; None without validation images.
    """

    def __init__(
        self, directory: Path, loader: TrainLoader, validator: ImageValidator | None
    ) -> None:
        super().__init__(directory)
        self.loader = loader
        self.validator = validator
        self._last_epoch_step: int | None = None

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        super().on_start(step=step, total_steps=total_steps, settings=settings)
        if step == 0:
            self.writer.add_images("train/augmented", _load_first_images(self.loader), 0)

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        super().on_epoch(metrics, model)
        self._last_epoch_step = metrics["step"]

    def on_end(self) -> None:
        if self._last_epoch_step is not None and self.validator and self.validator.last_scores:
            class_names = self.loader.dataset.class_names
            figure = plot_confusion(self.validator.last_scores, class_names=class_names)
            self.writer.add_figure("validation/confusion", figure, self._last_epoch_step)
        super().on_end()


def save_first_images(loader: TrainLoader, path: Path) -> None:
    """Write the first training images as one picture, a PNG."""
    # a second to import
    from torchvision.utils import save_image

    images = _load_first_images(loader)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: save_image(images, file, format="png", nrow=8))


def _load_first_images(loader: TrainLoader) -> Float[Tensor, "B 3 H W"]:
    """The first training images, augmented as the model gets them, as colours from 0 to 1."""
    batch = next(iter(loader.epoch(0)))
    images = batch.images[:_BATCH_IMAGES].float().cpu()
    mean = torch.tensor(loader.preprocess.mean).view(3, 1, 1)
    std = torch.tensor(loader.preprocess.std).view(3, 1, 1)
    return (images * std + mean).clamp(0, 1)
