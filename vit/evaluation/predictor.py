"""From uint8 images to float32 logits: the only inference loop, for evaluation, prediction and validation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.images import Preprocess
from vit.model.logits import compute_logits
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import Precision, autocast, choose_precision, copy_to_device
from vit.runtime.processes import current_process
from vit.runtime.threads import BatchThreads

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

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, batch_size: int | None = None, precision: str = "auto", mirrored: bool = False
    ) -> Self:
        """`bundle` on the device it is on."""
        device = next(bundle.model.parameters()).device
        size, chosen = batch_size or choose_batch_size(device), choose_precision(precision, device)
        return cls(bundle.model, bundle.preprocess, len(bundle.class_names), size, device, chosen, mirrored)

    @torch.inference_mode()
    def predict(
        self,
        read: Callable[[int, int], Pixels],
        *,
        count: int,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> Logits:
        """Logits [count, num_classes] of the images that `read(start, stop)` gives, uint8 [B, H, W, 3].

        In a process group every process takes every world_size-th batch and gets all logits back. Batches are cut the
        same way whatever the number of processes, so the logits are the same to the last bit; none is padded, so no
        image counts twice. A process without a batch of its own in the last round still runs the model, on an empty
        image: the weights of a sharded model come together only where all processes call it. `on_progress` receives
        how many images are done, over all processes. On a CPU several threads call both.
        """
        process = current_process()
        size, world_size = self.batch_size, process.world_size
        logits = torch.zeros(count, self.num_classes, device=self.device if world_size > 1 else "cpu")

        @torch.inference_mode()  # each thread has modes of its own
        def run(rounds: Iterable[int]) -> None:
            # one context around the loop: autocast keeps its bf16 copies of the weights until it is left
            with autocast(self.device, self.precision):
                for first in rounds:
                    start = first + process.rank * size
                    stop = min(start + size, count)
                    if start >= count:
                        self._compute(torch.zeros(1, *self.preprocess.image_size, 3, dtype=torch.uint8))
                        continue
                    logits[start:stop] = self._compute(torch.from_numpy(np.array(read(start, stop)))).to(logits.device)
                    on_progress(min(world_size * size, count - start))

        rounds = range(0, count, world_size * size)
        if (
            self.device.type == "cpu"
            and isinstance(self.model, VisionTransformer)
            and world_size == 1
            and len(rounds) > 1
        ):
            threads = BatchThreads()
            pending = iter(rounds)  # each thread takes the next batch when it is done
            list(threads.map(run, [pending] * threads.count))
        else:
            run(rounds)
        if world_size > 1:
            dist.all_reduce(logits)  # all processes but one hold zero for an image: this sum rounds nothing
        return cast(Logits, logits.cpu().numpy())

    def _compute(self, pixels: Tensor) -> Tensor:
        images = self.preprocess.normalize(copy_to_device({"pixels": pixels}, self.device)["pixels"])
        logits = compute_logits(self.model, images)
        return (logits + compute_logits(self.model, images.flip(-1))) / 2 if self.mirrored else logits


def choose_batch_size(device: torch.device) -> int:
    """Images a forward pass: on a CPU the 64 that its caches hold, else 256."""
    return 64 if device.type == "cpu" else 256
