"""What TensorBoard shows of attention during training: statistics of every layer, and maps of the same images."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from vit.data.images import Geometry, Preprocess
from vit.explanation.capture.readout import run_forward
from vit.explanation.methods.rollout import rollout_row
from vit.explanation.render.overlay import ColourScale, blend, find_range

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_MIN_SIDE = 96  # pixels; small images are enlarged to be seen


@dataclass(frozen=True, eq=False)
class AttentionImages:
    """Writes to TensorBoard, at every evaluation, each layer's attention entropy and mean attention distance and the
    rollout of the same validation images."""

    images: np.ndarray  # uint8 [n, H, W, 3], at the model's input size
    preprocess: Preprocess

    @torch.no_grad()
    def __call__(self, writer: "SummaryWriter", model: nn.Module, step: int) -> None:
        device = next(model.parameters()).device
        batch = self.preprocess.normalize(torch.from_numpy(self.images).to(device))
        forward = run_forward(model, batch)
        prefix = forward.num_prefix_tokens
        for number, layer in enumerate(forward.record.layers):
            attention = layer.attention()
            writer.add_scalar(f"attention_entropy/layer_{number:02d}", compute_attention_entropy(attention), step)
            distance = compute_attention_distance(attention, grid=forward.grid, num_prefix_tokens=prefix)
            writer.add_scalar(f"attention_distance/layer_{number:02d}", distance, step)
        row = rollout_row(forward.readout, forward.record.layers)
        maps = torch.unflatten(row[:, prefix:], -1, forward.grid).float().cpu().numpy()
        writer.add_image("attention/rollout", self._draw(maps), step, dataformats="HWC")

    def _draw(self, maps: Float[np.ndarray, "n rows columns"]) -> np.ndarray:
        """The images side by side, each above its map."""
        height, width = self.images.shape[1:3]
        enlarge = max(1, -(-_MIN_SIDE // min(height, width)))
        geometry = Geometry(original_size=(width, height), box=(0.0, 0.0, float(width), float(height)))
        columns = []
        for pixels, values in zip(self.images, maps, strict=True):
            photo = Image.fromarray(pixels.repeat(enlarge, axis=0).repeat(enlarge, axis=1))
            scale = ColourScale(*find_range([values], signed=False), signed=False, label="")
            columns.append(np.concatenate([photo, blend(photo, values, geometry, scale=scale)]))
        return np.concatenate(columns, axis=1)


def compute_attention_entropy(attention: Float[Tensor, "B H N N"]) -> float:
    """Mean entropy of the attention rows in nats: 0 (one token each) to log N (uniform)."""
    return float(torch.special.entr(attention).sum(dim=-1).mean())


def compute_attention_distance(
    attention: Float[Tensor, "B H N N"], *, grid: tuple[int, int], num_prefix_tokens: int
) -> float:
    """Mean distance, in patches, from a patch to the patches it attends to (Dosovitskiy et al. 2021, appendix D.7)."""
    patches = attention[..., num_prefix_tokens:, num_prefix_tokens:]
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows, columns], dim=-1).flatten(0, 1).to(patches)  # [P, 2]
    distances = torch.cdist(places, places)
    total = patches.sum(dim=-1).clamp_min(torch.finfo(patches.dtype).tiny)
    return float(((patches * distances).sum(dim=-1) / total).mean())


def undo_normalization(images: Float[Tensor, "B 3 H W"], preprocess: Preprocess) -> Float[Tensor, "B 3 H W"]:
    """Normalised images as colours from 0 to 1."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocess.mean, preprocess.std))
    return (images.float().cpu() * std + mean).clamp(0, 1)
