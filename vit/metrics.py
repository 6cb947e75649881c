"""Running means, for training and validation: kept on the device, read only when somebody looks."""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import MeanMetric


class RunningMeans:
    """Means of named values over everything handed in since the last reset, over all processes.

    >>> means = RunningMeans(("loss", "top1"), device="cpu")
    >>> means.update({"loss": losses, "top1": compute_hits(logits, labels)})  # [B] each
    >>> means.compute()
    {'loss': 1.234, 'top1': 0.5}
    """

    def __init__(self, names: tuple[str, ...], *, device: torch.device | str) -> None:
        # "disable": the others look for NaN on the host, a wait in every step; a NaN shows in the mean
        self._means = {name: MeanMetric(nan_strategy="disable").to(device) for name in names}
        if torch.device(device).type != "mps":  # which has no float64
            for mean in self._means.values():
                mean.set_dtype(torch.float64)  # float32 drifts by 1e-5 over a million samples

    def update(self, values: Mapping[str, Tensor]) -> None:
        """Add values: one a sample, [B], or a scalar that counts as one. No host synchronisation."""
        for name, value in values.items():
            self._means[name].update(value.detach())

    def compute(self) -> dict[str, float]:
        """The means; waits for the device."""
        return {name: float(mean.compute()) for name, mean in self._means.items()}

    def reset(self) -> None:
        """Forget everything."""
        for mean in self._means.values():
            mean.reset()


def compute_hits(
    logits: Float[Tensor, "B C"], labels: Int[Tensor, " B"], *, k: int = 1
) -> Float[Tensor, " B"]:
    """1 where the label is among the `k` highest logits (all classes where there are fewer), else 0."""
    top = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return (top == labels[:, None]).any(dim=1).float()
