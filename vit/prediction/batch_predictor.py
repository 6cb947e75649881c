"""The only inference loop: from uint8 images, in memory or of a data set, to float32 logits and
features."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, cast

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.model.logits import (
    Readout,
    compute_block_features,
    compute_logits,
    compute_logits_and_features,
    count_features,
    list_readouts,
)
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.probabilities import Float32s
from vit.runtime.device import (
    Precision,
    autocast,
    choose_precision,
    copy_to_device,
    run_in_memory,
)
from vit.runtime.processes import current_process
from vit.runtime.progress import show_progress
from vit.runtime.threads import MAX_THREADS, BatchThreads

Pixels = NDArray[np.uint8]
# `read(start, stop)` returns these images as the model sees them, uint8 [B, H, W, 3].
Read = Callable[[int, int], Pixels]
# (number of blocks, pooling) → features of the images
Features = Mapping[Readout, Float[Tensor, "n D"]]
# On a CPU, smaller batches cost more than their images do.
_MIN_BATCH_SIZE = 16


@dataclass
class BatchPredictor:
    """A model in evaluation mode with the conditions that it runs under."""

    model: nn.Module
    preprocess: Preprocess
    num_classes: int
    # images in a forward pass; fewer if a GPU's memory doesn't hold them
    batch_size: int
    device: torch.device
    precision: Precision

    def __post_init__(self) -> None:
        # Largest number of images that fitted a GPU's memory so far.
        self._part_size = self.batch_size

    @classmethod
    def from_bundle(
        cls, bundle: Bundle, *, batch_size: int | None = None, precision: str = "auto"
    ) -> Self:
        """Return a predictor on the bundle's device; by default with the batch size and precision
        that suit the device."""
        return cls(
            model=bundle.model,
            preprocess=bundle.preprocess,
            num_classes=len(bundle.class_names),
            batch_size=batch_size or choose_batch_size(bundle.device),
            device=bundle.device,
            precision=choose_precision(precision, bundle.device),
        )

    def predict(
        self,
        read: Read,
        *,
        count: int,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> Float32s:
        """Compute the logits of images, float32 [count, num_classes]. See `compute`."""
        logits = self.compute(
            partial(compute_logits, self.model),
            read,
            shape=(count, self.num_classes),
            on_progress=on_progress,
        )
        return cast(Float32s, logits.numpy())

    def predict_with_features(
        self,
        read: Read,
        *,
        count: int,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> tuple[Float32s, Float32s]:
        """Compute the logits [count, num_classes] and the pooled features [count, D] that the head
        reads, which are those of the image alone; `count_features` is their width D."""

        def compute_batch(batch: Tensor) -> Tensor:
            logits, features = compute_logits_and_features(self.model, batch)
            # side by side, so that they are copied at once; a model without a classifier has no
            # logits
            return torch.cat([logits[:, : self.num_classes], features], dim=1)

        width = self.num_classes + count_features(self.model)
        shape = (count, width)
        results = self.compute(compute_batch, read, shape=shape, on_progress=on_progress).numpy()
        return results[:, : self.num_classes], results[:, self.num_classes :]

    @torch.inference_mode()
    def compute(
        self,
        function: Callable[[Tensor], Tensor],
        read: Read,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        on_progress: Callable[[int], object] = lambda done: None,
    ) -> Tensor:
        """Compute something for each image, and return it for all of them, on the CPU.

        In a process group every process takes every world_size-th batch and gets all results back.
        The batches don't depend on the number of processes, so neither does any bit of the results.
        No batch is padded, so no image counts twice.

        Args:
            function: Maps normalised images [B, 3, H, W] to their results; it calls the model.
            read: Reads images; on a CPU several threads call it.
            shape: Shape of all results: the number of images, then the shape for one image.
            on_progress: Called with the number of images just done by all processes together; on a
                CPU from several threads.
        """
        count = shape[0]
        process = current_process()
        world_size = process.world_size
        results_device = self.device if world_size > 1 else torch.device("cpu")
        results = torch.zeros(shape, dtype=dtype, device=results_device)
        batch_size = self.batch_size
        if self.device.type == "cpu" and count > batch_size:
            # All threads get about equally many images. The number of threads that there are
            # doesn't count, because the last bits of a result depend on the batch size.
            num_rounds = math.ceil(count / (batch_size * MAX_THREADS))
            equal_size = math.ceil(count / (num_rounds * MAX_THREADS))
            batch_size = max(equal_size, min(batch_size, _MIN_BATCH_SIZE))
        # one batch for each process
        images_a_round = world_size * batch_size

        def run_part(start: int, stop: int) -> None:
            pixels = torch.from_numpy(np.array(read(start, stop)))
            images = self.preprocess.normalize(copy_to_device(pixels, self.device))
            results[start:stop] = function(images).to(results_device)

        # inference mode is set for each thread
        @torch.inference_mode()
        def run(rounds: Iterable[int]) -> None:
            # One context around the loop: autocast keeps its bf16 copies of the weights as long.
            with autocast(self.device, self.precision):
                for first in rounds:
                    start = first + process.rank * batch_size
                    stop = min(start + batch_size, count)
                    # in the last round this process may have no batch
                    if start >= count:
                        continue
                    self._part_size = run_in_memory(
                        run_part, start, stop, part_size=self._part_size, device=self.device
                    )
                    on_progress(min(images_a_round, count - start))

        rounds = range(0, count, images_a_round)
        is_threadable = self.device.type == "cpu" and isinstance(self.model, VisionTransformer)
        if is_threadable and world_size == 1 and len(rounds) > 1:
            threads = BatchThreads()
            # each thread takes the next batch when it has finished one
            pending = iter(rounds)
            list(threads.map(run, [pending] * threads.count))
        else:
            run(rounds)
        if world_size > 1:
            # for each image all processes but one hold zero, so the sum rounds nothing
            dist.all_reduce(results)
        return results.cpu()


def read_from(images: Sequence[Pixels]) -> Read:
    """Return a `Read` for images in memory, uint8 [H, W, 3] each."""
    return lambda start, stop: np.stack(images[start:stop])


def choose_batch_size(device: torch.device) -> int:
    """Return the number of images in a forward pass: on a CPU the 64 that its caches hold, else
    256."""
    return 64 if device.type == "cpu" else 256


def compute_features(predictor: BatchPredictor, dataset: ImageDataset) -> Features:
    """Compute the pooled features of images after each block.

    Returns:
        Features by number of blocks and pooling ("token": the class token, "avg": the mean of the
        patches), float32 [n, D] on the CPU. For a model of timm, (0, "pre_logits") is the input of
        its classifier.

    Raises:
        ValueError, OSError: An image can't be read, or the model has no pooled features.
    """
    model = predictor.model
    readouts = list_readouts(model)
    title = f"features of {dataset.name} {dataset.split}"
    with show_progress(title, len(dataset), shown=current_process().is_main) as advance:
        values = predictor.compute(
            partial(compute_block_features, model),
            partial(read_dataset, dataset, predictor.preprocess),
            shape=(len(dataset), len(readouts), count_features(model)),
            on_progress=advance,
        )
    return {readout: values[:, place] for place, readout in enumerate(readouts)}


def predict_dataset(bundle: Bundle, dataset: ImageDataset) -> tuple[Float32s, Float32s]:
    """Compute the logits of images, [n, C], and the features that the head reads, [n, D]; [n, 0] for
    a model whose features are unknown."""
    predictor = BatchPredictor.from_bundle(bundle)
    read = partial(read_dataset, dataset, bundle.preprocess)
    if count_features(bundle.model):
        return predictor.predict_with_features(read, count=len(dataset))
    logits = predictor.predict(read, count=len(dataset))
    return logits, logits[:, :0]


def read_dataset(dataset: ImageDataset, preprocess: Preprocess, start: int, stop: int) -> Pixels:
    """Return images start … stop-1 as the model sees them, uint8 [B, H, W, 3]."""
    if dataset.pixels is not None:
        return preprocess.crop(dataset.pixels[start:stop])
    images = [preprocess.to_uint8(dataset.image(index)) for index in range(start, stop)]
    return np.stack(images)
