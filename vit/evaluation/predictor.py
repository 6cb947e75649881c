"""From uint8 images to logits, as fast as the model goes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from vit.data.images import Preprocess
from vit.model.logits import compute_logits
from vit.runtime.device import Precision, autocast

Pixels = NDArray[np.uint8]
Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Predictor:
    """A model in evaluation mode with the conditions it runs under."""

    model: nn.Module
    preprocess: Preprocess
    num_classes: int
    batch_size: int
    device: torch.device
    precision: Precision
    mirrored: bool = False  # test-time augmentation: logits are the mean over each image and its mirror image

    @torch.inference_mode()
    def predict(
        self,
        read_batch: Callable[[int, int], Pixels],
        *,
        count: int,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> Logits:
        """Logits [count, num_classes] of the images that `read_batch(start, stop)` gives, uint8 [B, H, W, 3].

        In a process group every process takes every world_size-th batch and gets all logits back. Batches are
        cut the same way whatever the number of processes, so the logits are the same to the last bit; none is
        padded, so no image counts twice. `on_progress` hears how many images are done, over all processes.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        logits = torch.zeros(count, self.num_classes, device=self.device if world_size > 1 else "cpu")
        # one context around the loop: autocast keeps its bf16 copies of the weights until it is left
        with autocast(self.device, self.precision):
            for start in range(rank * self.batch_size, count, world_size * self.batch_size):
                stop = min(start + self.batch_size, count)
                pixels = torch.from_numpy(np.array(read_batch(start, stop)))
                images = self.preprocess.normalize(pixels.to(self.device))
                of_batch = compute_logits(self.model, images)
                if self.mirrored:
                    of_batch = (of_batch + compute_logits(self.model, images.flip(-1))) / 2
                logits[start:stop] = of_batch.to(logits.device)
                on_progress(min(world_size * self.batch_size, count - start))
        if world_size > 1:
            dist.all_reduce(logits)  # a row is zero in every process but one: this sum rounds nothing
        return cast(Logits, logits.cpu().numpy())
