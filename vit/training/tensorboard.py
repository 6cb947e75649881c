"""TensorBoard's view of a run: curves, the first training images and a confusion matrix."""

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
from vit.training.validation import ImageValidator

# Images of the first batch that are shown.
_BATCH_IMAGES = 64


class TensorBoard(Observer):
    """Writes curves, the configuration and pictures for TensorBoard. The curves of a resumed run go
    on from its checkpoint.

    Args:
        run_directory: Directory of the run; the files are in `tensorboard` below it.
        loader: Loader of the training images; None shows none.
        validator: Has the scores of the last evaluation; None shows no confusion matrix.
    """

    def __init__(
        self,
        run_directory: Path,
        loader: TrainLoader | None = None,
        validator: ImageValidator | None = None,
    ) -> None:
        self.directory = run_directory / "tensorboard"
        self.loader = loader
        self.validator = validator
        self.writer: Any = None  # a SummaryWriter; torch's types lack half of it
        self._last_epoch_step: int | None = None

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        # takes a second to import
        from torch.utils.tensorboard import SummaryWriter

        # Lines that a killed process logged after its last checkpoint are replaced.
        purge_step = None
        if step:
            purge_step = step + 1
        # Files are read in the order of their names, which begin with the second and end with a
        # process and a number, which have no order. The clock may stand still or go back.
        deadline = time.monotonic() + 1.1
        while time.monotonic() < deadline and any(
            self.directory.glob(f"events.out.tfevents.{int(time.time())}.*")
        ):
            time.sleep(0.01)
        self.writer = SummaryWriter(str(self.directory), purge_step=purge_step)
        text = "\n".join(f"    {key}: {value}" for key, value in settings.items())
        self.writer.add_text("configuration", text, step)
        self.writer.flush()
        if step == 0 and self.loader is not None:
            self.writer.add_images("train/augmented", _load_first_images(self.loader), 0)

    def on_step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] % LOG_EVERY_STEPS:
            return
        for name in ("loss", "gradient_norm", "learning_rate"):
            self.writer.add_scalar(f"step/{name}", float(metrics[name]), metrics["step"])

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        for key, value in metrics.items():
            if key not in ("epoch", "step") and value is not None:
                self.writer.add_scalar(f"epoch/{key}", value, metrics["step"])
        self.writer.flush()
        self._last_epoch_step = metrics["step"]

    def on_end(self) -> None:
        if self.writer is None:
            return
        scores = self.validator.last_scores if self.validator else None
        # a confusion matrix needs one class an image
        if (
            scores is not None
            and not scores.is_multilabel
            and self.loader is not None
            and self._last_epoch_step is not None
        ):
            # matplotlib takes half a second
            from vit.evaluation.report.charts import plot_confusion

            figure = plot_confusion(scores, class_names=self.loader.dataset.class_names)
            self.writer.add_figure("validation/confusion", figure, self._last_epoch_step)
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
