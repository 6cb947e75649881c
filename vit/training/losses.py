"""The losses of a training step: functions from logits and targets to the mean loss and the number
of images that are right."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.runtime.arguments import first_line
from vit.runtime.tensors import describe_shape

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
    """Build the loss of a run.

    Args:
        multilabel: An image may have several labels: the loss is the mean binary cross-entropy.
        label_smoothing: Label smoothing of `torch.nn.functional.cross_entropy`, from 0 to 1.
        class_weights: Factor of an image's loss for each class; their mean over the training images
            is 1. With several labels, the factor of the loss where an image has the label.
        user_loss: Loss from Python instead.

    Raises:
        ValueError: The user's loss can't be used.
    """
    weighs = class_weights is not None
    if user_loss is not None:
        _check_user_loss(
            user_loss, label_smoothing=label_smoothing, weighs_labels=multilabel and weighs
        )
        compute: Any = partial(_compute_user_loss, user_loss, class_weights=class_weights)
    else:
        compute = partial(
            _compute_binary_cross_entropy if multilabel else _compute_cross_entropy,
            label_smoothing=label_smoothing,
            class_weights=class_weights,
        )
    count_right = _count_right_labels if multilabel else _count_right_classes

    def compute_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return compute(logits.float(), targets), count_right(logits.detach(), targets)

    return compute_loss


def _compute_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, class_weights: Tensor | None
) -> Tensor:
    """Compute the mean cross-entropy, where each image has the weight of its class.

    torch's own would weigh the smoothing by the other classes' weights: a common image whose class
    is certain would be pulled to a rare class by its large weight. It would also divide by the sum
    of the weights, so that the parts of a batch would not add up to the batch.
    """
    if class_weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    targets = targets * class_weights
    mean = targets.mean(dim=1, keepdim=True).expand_as(targets)
    return F.cross_entropy(logits, targets.lerp(mean, label_smoothing))


def _compute_binary_cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float, class_weights: Tensor | None
) -> Tensor:
    smoothed = targets + label_smoothing * (0.5 - targets)
    return F.binary_cross_entropy_with_logits(logits, smoothed, pos_weight=class_weights)


def _compute_user_loss(
    loss: Loss, logits: Tensor, targets: Tensor, *, class_weights: Tensor | None
) -> Tensor:
    name = getattr(loss, "__name__", type(loss).__name__)
    call = f"loss: {name} of logits {describe_shape(logits)} and targets {describe_shape(targets)}"
    try:
        losses = loss(logits, targets)
    except Exception as error:  # a function may raise anything
        raise ValueError(f"{call} fails ({first_line(error)})") from error
    shape = describe_shape(losses)
    if shape not in ([], [len(logits)]) or not losses.requires_grad:
        raise ValueError(
            f"{call} gives {shape}, not a mean [] or the losses [{len(logits)}] to differentiate"
        )
    if class_weights is None:
        return losses.mean()
    if shape == []:
        raise ValueError(
            f"{call} gives a mean, in which classes can't be weighted; return the losses of the"
            ' images (reduction="none"), or set train.class_balance=none'
        )
    weights = class_weights[targets] if targets.ndim == 1 else targets @ class_weights
    return (losses * weights).mean()


def _count_right_classes(logits: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim == 2:
        targets = targets.argmax(dim=1)
    return (logits.argmax(dim=1) == targets).sum()


def _count_right_labels(logits: Tensor, targets: Tensor) -> Tensor:
    return ((logits > 0) == (targets > 0.5)).all(dim=1).sum()


def _check_user_loss(loss: Loss, *, label_smoothing: float, weighs_labels: bool) -> None:
    if label_smoothing:
        raise ValueError("loss takes the place of label smoothing; leave train.label_smoothing out")
    if weighs_labels:
        raise ValueError(
            "loss computes the loss of all labels of an image, which class weights can't weigh; set"
            " train.class_balance=none"
        )
    if isinstance(loss, nn.Module) and any(weight.requires_grad for weight in loss.parameters()):
        name = type(loss).__name__
        raise ValueError(f"{name} has weights of its own, which loss= doesn't train; move them")
