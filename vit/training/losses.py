"""The losses of a training step: functions from logits and targets to the mean loss and the number
of images that are right."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

# (logits [B, C], targets) → (mean loss, number of images that are right). The targets are classes
# [B], class probabilities [B, C], or which labels an image has [B, C].
StepLoss = Callable[[Tensor, Tensor], tuple[Float[Tensor, ""], Int[Tensor, ""]]]
# A loss from Python, from logits and targets to the losses of the images [B] or their mean.
Loss = Callable[[Tensor, Tensor], Tensor]


def build_loss(
    *,
    multilabel: bool = False,
    label_smoothing: float = 0.0,
    class_weights: Float[Tensor, " C"] | None = None,
    user_loss: Loss | None = None,
) -> StepLoss:
    """Build the loss of a run: cross-entropy, where images have several labels the mean binary
    cross-entropy, or `user_loss`. `class_weights` are the factors of an image's loss for each
    class, whose mean over the training images is 1; with several labels, of the loss where an image
    has the label."""

    def compute_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        answers = logits.detach()
        logits = logits.float()
        if user_loss is not None:
            loss = user_loss(logits, targets).mean()
        elif multilabel:
            smoothed = targets + label_smoothing * (0.5 - targets)
            loss = F.binary_cross_entropy_with_logits(logits, smoothed, pos_weight=class_weights)
        elif class_weights is None:
            loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
        else:
            loss = _compute_weighted_loss(logits, targets, label_smoothing, class_weights)
        if multilabel:
            return loss, ((answers > 0) == (targets > 0.5)).all(dim=1).sum()
        classes = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return loss, (answers.argmax(dim=1) == classes).sum()

    return compute_loss


def _compute_weighted_loss(
    logits: Tensor, targets: Tensor, label_smoothing: float, class_weights: Tensor
) -> Tensor:
    """Compute the mean cross-entropy, where each image has the weight of its class.

    torch's own would weigh the smoothing by the other classes' weights: a common image whose class
    is certain would be pulled to a rare class by its large weight. It would also divide by the sum
    of the weights, so that the parts of a batch would not add up to the batch.
    """
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    targets = targets * class_weights
    mean = targets.mean(dim=1, keepdim=True).expand_as(targets)
    return F.cross_entropy(logits, targets.lerp(mean, label_smoothing))
