"""What TensorBoard shows of a run: the first batch, the attention of validation images, and the
last confusion matrix."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from vit.data.images import Geometry, Preprocess
from vit.data.loader import TrainLoader
from vit.evaluation.metrics import plot_confusion
from vit.explanation.capture.forward import run_forward
from vit.explanation.methods.rollout import compute_rollout
from vit.explanation.render.overlay import blend, fit_scale
from vit.factory.data import TrainingData
from vit.factory.validation import Validator
from vit.model.vision_transformer import VisionTransformer
from vit.options import MapOptions
from vit.training.observers import TensorBoard

_BATCH_IMAGES = 64  # of the first batch, that are shown
_MIN_SIDE = 96  # pixels; small images are enlarged to be seen


class RunPictures(TensorBoard):
    """TensorBoard with the pictures of a run.

    Args:
        run_directory: as of `TensorBoard`.
        data: of the run.
        loader: of its training batches.
        validator: has the scores of the last evaluation; None without validation images.
        num_attention_maps: validation images whose maps are shown.
    """

    def __init__(
        self,
        run_directory: Path,
        data: TrainingData,
        loader: TrainLoader,
        validator: Validator | None,
        num_attention_maps: int,
    ) -> None:
        super().__init__(run_directory)
        self.data = data
        self.loader = loader
        self.validator = validator
        self.num_attention_maps = num_attention_maps
        self._last_epoch_step: int | None = None

    def on_start(self, *, step: int, total_steps: int, settings: Mapping[str, Any]) -> None:
        super().on_start(step=step, total_steps=total_steps, settings=settings)
        if step == 0:
            images = load_first_images(self.loader, self.data.preprocess)
            self.writer.add_images("train/augmented", images, 0)

    def on_epoch(self, metrics: dict[str, Any], model: nn.Module) -> None:
        if metrics["val_loss"] is not None:
            self._draw_attention(model, metrics["step"])
        super().on_epoch(metrics, model)
        self._last_epoch_step = metrics["step"]

    def on_end(self) -> None:
        scores = None if self.validator is None else self.validator.last_scores
        if self._last_epoch_step is not None and scores is not None:
            figure = plot_confusion(scores, class_names=self.data.train.class_names)
            self.writer.add_figure("validation/confusion", figure, self._last_epoch_step)
        super().on_end()

    @torch.no_grad()
    def _draw_attention(self, model: nn.Module, step: int) -> None:
        """Each layer's attention entropy and mean attention distance, and rollouts."""
        if not self.num_attention_maps or not isinstance(model, VisionTransformer):
            return
        # the same images every time, so that their maps can be followed through training; spread
        # over all, since they are sorted by class
        all_images = self.data.decoded_validation.pixels
        assert all_images is not None, "validation images are always decoded"
        count = min(self.num_attention_maps, len(all_images))
        indices = np.linspace(0, len(all_images) - 1, count).round().astype(int)
        preprocess = self.data.preprocess
        images = preprocess.crop(np.asarray(all_images[indices]))

        pixels = torch.from_numpy(images).to(next(model.parameters()).device)
        forward = run_forward(model, preprocess.normalize(pixels))
        num_prefix = forward.num_prefix_tokens
        for number, layer in enumerate(forward.record.layers):
            attention = layer.attention()
            entropy = compute_attention_entropy(attention)
            distance = compute_attention_distance(
                attention, grid=forward.grid, num_prefix_tokens=num_prefix
            )
            self.writer.add_scalar(f"attention_entropy/layer_{number:02d}", entropy, step)
            self.writer.add_scalar(f"attention_distance/layer_{number:02d}", distance, step)

        relevance = compute_rollout(forward, MapOptions())
        maps = torch.unflatten(relevance[:, num_prefix:], -1, forward.grid).float().cpu().numpy()
        self.writer.add_image(
            "attention/rollout", _draw_maps(images, maps), step, dataformats="HWC"
        )


def load_first_images(loader: TrainLoader, preprocess: Preprocess) -> Float[Tensor, "B 3 H W"]:
    """The first training images, augmented as the model gets them, as colours from 0 to 1."""
    batch = next(iter(loader.epoch(0)))
    images = batch.images[:_BATCH_IMAGES].float().cpu()
    mean = torch.tensor(preprocess.mean).view(3, 1, 1)
    std = torch.tensor(preprocess.std).view(3, 1, 1)
    return (images * std + mean).clamp(0, 1)


def compute_attention_entropy(attention: Float[Tensor, "B H N N"]) -> float:
    """Mean entropy of the attention rows in nats: 0 (one token each) to log N (uniform)."""
    return float(torch.special.entr(attention).sum(dim=-1).mean())


def compute_attention_distance(
    attention: Float[Tensor, "B H N N"], *, grid: tuple[int, int], num_prefix_tokens: int
) -> float:
    """Mean distance from a patch to the patches it attends to (Dosovitskiy et al. 2021, appendix
    D.7).

    Args:
        attention: of one layer, after the softmax, [B, H, N, N].
        grid: (rows, columns) of patches.
        num_prefix_tokens: tokens in front of the patches, which are left out.

    Returns:
        The mean over images, heads and patches, in patches.
    """
    patches = attention[..., num_prefix_tokens:, num_prefix_tokens:]
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows, columns], dim=-1).flatten(0, 1).to(patches)  # [P, 2]
    distances = torch.cdist(places, places)
    # rows of a layer may give all their attention to the prefix tokens
    total = patches.sum(dim=-1).clamp_min(torch.finfo(patches.dtype).tiny)
    return float(((patches * distances).sum(dim=-1) / total).mean())


def _draw_maps(images: np.ndarray, maps: Float[np.ndarray, "n rows columns"]) -> np.ndarray:
    """The images, uint8 [n, H, W, 3], side by side, each above its map."""
    height, width = images.shape[1:3]
    # by whole factors: each pixel stays a square
    enlarge = max(1, -(-_MIN_SIDE // min(height, width)))
    geometry = Geometry((width, height), box=(0.0, 0.0, float(width), float(height)))
    columns = []
    for pixels, values in zip(images, maps, strict=True):
        photo = Image.fromarray(pixels.repeat(enlarge, axis=0).repeat(enlarge, axis=1))
        scale = fit_scale([values], signed=False)
        columns.append(np.concatenate([photo, blend(photo, values, geometry, scale=scale)]))
    return np.concatenate(columns, axis=1)
