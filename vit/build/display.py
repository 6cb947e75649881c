"""What the user sees of a run: a progress bar, the metrics file, TensorBoard."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from vit.build.attention_images import AttentionImages, undo_normalization
from vit.build.data import Data, Loader
from vit.config import Config
from vit.evaluation.metrics import Scores
from vit.evaluation.plots import plot_confusion
from vit.model.vision_transformer import VisionTransformer
from vit.training.observers import MetricsFile, Observer, ProgressBar, TensorBoard
from vit.training.plan import TrainingPlan
from vit.training.remaining import RemainingTime

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def build_observers(
    config: Config,
    data: Data,
    loader: Loader,
    model: nn.Module,
    *,
    plan: TrainingPlan,
    last_scores: list[Scores],
    directory: Path,
) -> list[Observer]:
    """What the user sees: a progress bar, the metrics file, TensorBoard."""
    count = config.train.attention_maps if data.validation is not None else 0
    # a sharded model's forward pass takes all processes, and only the main one has observers
    count *= config.train.parallel != "fsdp" and isinstance(model, VisionTransformer)

    def show_attention(writer: "SummaryWriter", model: nn.Module, step: int) -> None:
        images = data.decode_validation().images
        assert images is not None, "validation images are always decoded"
        # they are sorted by class
        chosen = np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int)
        AttentionImages(data.preprocess.crop(np.asarray(images[chosen])), data.preprocess)(writer, model, step)

    def show_batch(writer: "SummaryWriter") -> None:
        images = undo_normalization(next(iter(loader.epoch(0))).images[:64], data.preprocess)
        writer.add_images("train/augmented", images, 0)

    def show_confusion(writer: "SummaryWriter", step: int) -> None:
        for scores in last_scores:
            figure = plot_confusion(scores, class_names=data.train.class_names)
            writer.add_figure("validation/confusion", figure, step)

    tensorboard = TensorBoard(
        directory, at_start=show_batch, at_evaluation=show_attention if count else None, at_end=show_confusion
    )
    remaining = RemainingTime(plan, image_size=data.preprocess.image_size)
    return [ProgressBar(remaining), MetricsFile(directory), tensorboard]
