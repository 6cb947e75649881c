"""The probability of a class when patches are removed. A vision transformer takes any number of tokens, so a patch is
removed by leaving its token out after the position embedding: nothing is painted over, and no image is made that is
unlike those of the training (Jain et al. 2022). Painting over, with the mean or a blur, is there to compare."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from vit.explanation.capture.readout import Grid, Images
from vit.explanation.capture.tokens import can_drop_tokens, change_tokens, keep_tokens
from vit.model.logits import compute_logits
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import check_choice

FILLS = ("auto", "drop", "mean", "blur")
FRACTIONS = tuple(step / 10 for step in range(10))  # of the patches removed: 0 to 0.9

# row r is about image r modulo B: any number of removals from each of the B images, measured together
Classify = Callable[[Int[Tensor, "R kept"]], Float[Tensor, "R C"]]
Predict = Callable[[Int[Tensor, "R kept"]], Float[Tensor, "R ..."]]


@torch.no_grad()
def build_classifier(
    model: nn.Module,
    images: Images,
    *,
    grid: Grid,
    fill: str = "auto",
    batch_size: int = 64,
    on_forward: Callable[[float], object] = lambda forwards: None,
) -> Classify:
    """A function from the patches that are kept to logits. `fill`: "drop" leaves the other tokens out, "mean" paints
    their pixels with the image's mean colour, "blur" with a Gaussian blur of the image; "auto" is "drop" where the
    model allows it, else "mean".

    Images are embedded once, and what keeps every patch is computed once. The encoder takes as many rows at a time as
    have the tokens of `batch_size` whole images; `on_forward` gets the work done, 1 for each whole image."""
    check_choice(fill, FILLS, name="fill")
    if fill == "auto":
        fill = "drop" if can_drop_tokens(model) else "mean"
    patches, tokens, whole = grid[0] * grid[1], list[Tensor](), list[Tensor]()
    every = torch.arange(patches, device=images.device)

    def remember(entering: Tensor) -> Tensor:
        tokens.append(entering)
        return entering

    for batch in torch.split(images, batch_size):
        with ExitStack() as hooks:
            if fill == "drop":
                hooks.enter_context(keep_tokens(model, every.expand(len(batch), -1)))
                hooks.enter_context(change_tokens(model, remember))
            whole.append(compute_logits(model, batch))
    embedded = torch.cat(tokens) if tokens else images.new_empty(0, patches, 0)
    prefix = embedded.shape[1] - patches
    paint = _blur(images, sigma=images.shape[-1] / 8) if fill == "blur" else images.mean(dim=(-1, -2), keepdim=True)

    def run(of: Int[Tensor, " r"], kept: Int[Tensor, "r kept"]) -> Float[Tensor, "r C"]:
        if fill == "drop":
            chosen = torch.cat([embedded[of, :prefix], embedded[of[:, None], prefix + kept]], dim=1)
            if isinstance(model, VisionTransformer):  # whose convolutional stem may cost as much as its blocks
                for block in model.blocks:
                    chosen = block(chosen)
                with torch.autocast(images.device.type, enabled=False):
                    return model.forward_head(model.norm(chosen).float())
            with change_tokens(model, lambda embedded_again: chosen):
                return compute_logits(model, images[of])
        return compute_logits(model, _paint_over(images[of], paint[of], kept, grid))

    @torch.no_grad()
    def classify(kept: Int[Tensor, "R kept"]) -> Float[Tensor, "R C"]:
        if kept.shape[1] == patches:  # in whatever order
            return torch.cat(whole).repeat(len(kept) // len(images), 1)
        work = (prefix + kept.shape[1]) / embedded.shape[1] if fill == "drop" else 1.0
        found = []
        for rows in torch.split(torch.arange(len(kept), device=images.device), max(int(batch_size / work), 1)):
            found.append(run(rows % len(images), kept[rows]))
            on_forward(work * len(rows))
        return torch.cat(found)

    return classify


def build_predictor(
    model: nn.Module, images: Images, classes: Int[Tensor, " B"], *, grid: Grid, fill: str = "auto"
) -> Predict:
    """A function from the patches that are kept to the probability of each image's class; see `build_classifier`."""
    classify = build_classifier(model, images, grid=grid, fill=fill)
    return lambda kept: score_classes(classify(kept), classes)[:, 0]


def score_classes(logits: Float[Tensor, "R C"], classes: Int[Tensor, " B"]) -> Float[Tensor, "R 2"]:
    """Probability and logit of each row's class."""
    chosen, logits = classes.repeat(len(logits) // len(classes))[:, None], logits.float()
    return torch.cat([logits.softmax(dim=1).gather(1, chosen), logits.gather(1, chosen)], dim=1)


def deletion_curve(
    predict: Predict, order: Int[Tensor, "R P"], *, fractions: Sequence[float] = FRACTIONS
) -> Float[Tensor, "R steps ..."]:
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


def _paint_over(images: Images, paint: Tensor, kept: Int[Tensor, "B kept"], grid: Grid) -> Images:
    mask = torch.zeros(len(images), grid[0] * grid[1], device=images.device).scatter_(1, kept, 1.0)
    mask = F.interpolate(mask.reshape(-1, 1, *grid), size=images.shape[-2:], mode="nearest")
    return images * mask + paint * (1 - mask)


def _blur(images: Images, *, sigma: float) -> Images:
    radius = max(int(2 * sigma), 1)
    offsets = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-((offsets / sigma) ** 2) / 2)
    kernel = (kernel / kernel.sum()).expand(3, 1, -1)
    padded = F.pad(images, (radius, radius, radius, radius), mode="replicate")
    across = F.conv2d(padded, kernel.unsqueeze(2), groups=3)
    return F.conv2d(across, kernel.unsqueeze(3), groups=3)
