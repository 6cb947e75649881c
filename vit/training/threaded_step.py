"""The forward and backward pass of a training step on a CPU, divided among threads.

See `vit.runtime.threads` for the reason. `TrainStep.forward_backward` is the plain form: both
compute the same, up to the order in which gradients are added.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vit.model.vision_transformer import VisionTransformer
from vit.runtime.threads import BatchThreads
from vit.training.loss_scale import LossScale


def choose_threads(model: nn.Module, *, device: torch.device) -> BatchThreads | None:
    """Return threads that divide a batch, for our models on a CPU with several cores, or None."""
    # Other models may compute something of the whole batch.
    is_ours = isinstance(model, VisionTransformer)
    if device.type != "cpu" or torch.get_num_threads() == 1 or not is_ours:
        return None
    # Dropout draws from torch's own generator, and the order of threads is not fixed.
    if any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
        return None
    return BatchThreads()


def forward_backward_on_threads(
    compute_loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    parameters: list[nn.Parameter],
    images: Tensor,
    targets: Tensor,
    *,
    threads: BatchThreads,
    num_micro_batches: int,
    loss_scale: LossScale | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the number of correct images of a batch. Its gradients, times the loss
    scale, are in `.grad`.

    Args:
        compute_loss: Function from images and targets to their mean loss and number of correct
            images.
        parameters: The model's parameters; frozen ones get no gradient.
        images: [B, 3, H, W].
        targets: Classes [B] or class probabilities [B, C].
        threads: Threads that the micro-batches are divided among.
        num_micro_batches: Micro-batches at least; the number is raised to a multiple of the
            threads.
        loss_scale: Loss scale of float16; None scales nothing.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]

    def differentiate(
        micro_batch: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
        loss, correct = compute_loss(*micro_batch)
        loss = loss * (len(micro_batch[0]) / len(images))
        # Not loss.backward(): threads would add to the same .grad in an order that is not fixed.
        scaled_loss = loss
        if loss_scale is not None:
            scaled_loss = loss_scale(loss)
        gradients = torch.autograd.grad(scaled_loss, trainable, allow_unused=True)
        return loss.detach(), correct, gradients

    num_rounds = -(-num_micro_batches // threads.count)
    num_parts = threads.count * num_rounds
    micro_batches = list(zip(images.chunk(num_parts), targets.chunk(num_parts), strict=True))

    # Add in the order of the batch, so that the sum doesn't depend on which thread is first.
    loss = torch.zeros(())
    correct = torch.zeros((), dtype=torch.int64)
    sums: list[Tensor | None] = [None] * len(trainable)
    for micro_loss, micro_correct, gradients in threads.map(
        differentiate, micro_batches, is_random=True
    ):
        loss = loss + micro_loss
        correct = correct + micro_correct
        for place, gradient in enumerate(gradients):
            total = sums[place]
            if total is None:
                sums[place] = gradient
            elif gradient is not None:  # None: the loss doesn't depend on this parameter
                sums[place] = total + gradient

    for parameter, gradient in zip(trainable, sums, strict=True):
        # torch's fused optimizers on a CPU read weight and gradient in the order of memory, and a
        # convolution's gradient has another order.
        if gradient is not None and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = gradient
    return loss, correct
