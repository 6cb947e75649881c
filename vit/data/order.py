"""The samples of each batch, as a function of (seed, epoch)."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from vit.data.random import SampleIds, StatelessRandom
from vit.runtime.processes import Process


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of the samples in an epoch, and their division into batches.

    A sample's id is its image's index. With balanced classes an image may come several times in an
    epoch: the k-th time its id is the index + k · (number of images), so that each time it has
    another augmentation.

    Args:
        batch_size: Images in a step, over all processes.
        seed: Seed of the order and of the augmentation.
        balanced: Draw every class as often as the others.
        process: This process, which takes a contiguous part of every batch.
    """

    batch_size: int
    seed: int
    balanced: bool = False
    process: Process = field(default_factory=Process)

    def list_batches(
        self, labels: Int64[Tensor, " n"], epoch: int, start_step: int
    ) -> Iterator[SampleIds]:
        """The sample ids of this process in each batch of an epoch.

        Args:
            labels: Class of each image.
            epoch: Number of the epoch, from 0.
            start_step: Number of the first batch.
        """
        num_steps = len(labels) // self.batch_size
        # contiguous parts of each batch: any number of processes trains on the same batches
        order = self._draw(labels, epoch)[: num_steps * self.batch_size]
        parts = order.view(num_steps, self.process.world_size, -1)
        return iter(parts[start_step:, self.process.rank])

    def _draw(self, labels: Int64[Tensor, " n"], epoch: int) -> SampleIds:
        """The ids of an epoch's samples, of all processes, in order."""
        count = len(labels)
        order = StatelessRandom(self.seed, epoch, torch.arange(count)).permutation()
        if not self.balanced:
            return order

        # Every class gets the same number of samples, give or take one: a part of the images of a
        # large class, and the images of a small one several times.
        labels = labels[order]
        class_sizes = torch.bincount(labels)
        class_sizes = class_sizes[class_sizes > 0]
        classes = torch.split(order[labels.argsort(stable=True)], class_sizes.tolist())

        # the remainder is shared out, so that the epoch keeps its length
        samples_per_class, remainder = divmod(count, len(classes))
        drawn = []
        for number, members in enumerate(classes):
            draws = torch.arange(samples_per_class + (number < remainder))
            repetition = draws // len(members)
            drawn.append(members[draws % len(members)] + count * repetition)
        return StatelessRandom(self.seed, epoch, torch.cat(drawn)).permutation("balanced order")
