"""The probability of a class when patches are removed. A vision transformer takes any number of tokens, so a patch is
removed by leaving its token out after the position embedding: nothing is painted over, and no image is made that is
unlike those of the training (Jain et al. 2022). Painting over, with the mean or a blur, is there to compare."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vit.explanation.capture.readout import Grid, Images
from vit.explanation.capture.tokens import can_drop_tokens, keep_tokens
from vit.model.logits import compute_logits
from vit.runtime.arguments import check_choice

FILLS = ("auto", "drop", "mean", "blur")
FRACTIONS = tuple(step / 10 for step in range(10))  # of the patches removed: 0 to 0.9

Predict = Callable[[Int[Tensor, "B kept"]], Float[Tensor, " B"]]


def build_predictor(
    model: nn.Module, images: Images, classes: Int[Tensor, " B"], *, grid: Grid, fill: str = "auto"
) -> Predict:
    """A function from the patches that are kept to the probability of each image's class. `fill`: "drop" leaves the
    other tokens out, "mean" paints their pixels with the image's mean colour, "blur" with a Gaussian blur of the image;
    "auto" is "drop" where the model allows it, else "mean"."""
    check_choice(fill, FILLS, name="fill")
    if fill == "auto":
        fill = "drop" if can_drop_tokens(model) else "mean"
    paint = _blur(images, sigma=images.shape[-1] / 8) if fill == "blur" else images.mean(dim=(-1, -2), keepdim=True)

    @torch.no_grad()
    def predict(kept: Int[Tensor, "B kept"]) -> Float[Tensor, " B"]:
        if fill == "drop":
            with keep_tokens(model, kept):
                logits = compute_logits(model, images)
        else:
            mask = torch.zeros(len(images), grid[0] * grid[1], device=images.device).scatter_(1, kept, 1.0)
            mask = F.interpolate(mask.reshape(-1, 1, *grid), size=images.shape[-2:], mode="nearest")
            logits = compute_logits(model, images * mask + paint * (1 - mask))
        return logits.float().softmax(dim=1).gather(1, classes[:, None])[:, 0]

    return predict


def deletion_curve(
    predict: Predict, order: Int[Tensor, "B P"], *, fractions: Sequence[float] = FRACTIONS
) -> Float[Tensor, "B steps"]:
    """Probabilities while the first patches of `order` are removed, at each fraction of the patches."""
    return torch.stack([predict(order[:, round(fraction * order.shape[1]) :]) for fraction in fractions], dim=1)


def leave_one_out(
    predict: Predict, *, batch: int, patches: int, device: torch.device, chosen: Sequence[int] | None = None
) -> Float[Tensor, "B chosen"]:
    """The drop in probability when one patch is left out (leave-one-out occlusion); of every patch, or of those
    `chosen`."""
    everything = torch.arange(patches, device=device).expand(batch, -1)
    left_out = range(patches) if chosen is None else chosen
    others = (torch.cat([everything[:, :patch], everything[:, patch + 1 :]], dim=1) for patch in left_out)
    return predict(everything)[:, None] - torch.stack([predict(kept) for kept in others], dim=1)


def area_under(curve: Float[Tensor, "B steps"], *, fractions: Sequence[float] = FRACTIONS) -> Float[Tensor, " B"]:
    """Trapezoidal area, divided by the range of the fractions: a mean probability."""
    points = torch.tensor(fractions, dtype=curve.dtype, device=curve.device)
    return torch.trapezoid(curve, points, dim=1) / (points[-1] - points[0])


def _blur(images: Images, *, sigma: float) -> Images:
    radius = max(int(2 * sigma), 1)
    offsets = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-((offsets / sigma) ** 2) / 2)
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    padded = F.pad(images, (radius, radius, radius, radius), mode="replicate")
    across = F.conv2d(padded, kernel.unsqueeze(2), groups=3)
    return F.conv2d(across, kernel.unsqueeze(3), groups=3)
