"""A short report with every map: how far may it be believed for this image?

Three questions, each with a threshold: does taking away what the map calls important hurt the prediction more
than taking patches away at random? Does the map change when the weights are scrambled? Is it about the
patches at all? It costs about 25 forward passes an image and one more explanation.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.explanation.capture.capture import find_attention_layers
from vit.explanation.faithfulness.token_ablation import area_under, build_predictor, deletion_curve
from vit.explanation.methods.table import MapOptions, Maps, compute_maps

RANDOM_ORDERS = 10
BEATEN_SHARE = 0.9  # of the random orders; a map drawn at random reaches it for about one image in six
FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the patches, taken away
CORRELATION_LIMIT = 0.3  # with the map of scrambled weights, or three standard errors where that is more
PREFIX_LIMIT = 0.5
UNIFORM_LIMIT = 0.98  # exp(entropy) / patches


@dataclass(frozen=True)
class Trust:
    """The report of one map. `deletion_gap`: how much lower the class's mean probability is when patches go
    in the map's order than in a random one; `beaten`: share of random orders that do less harm;
    `scrambled_correlation`: Spearman's, with the same method's map from scrambled weights."""

    deletion_gap: float
    beaten: float
    scrambled_correlation: float
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {**asdict(self), "warnings": list(self.warnings)}


class MapJudge:
    """Reports on the maps of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.scrambled = scramble(model)

    def judge(
        self,
        images: Float[Tensor, "B 3 height width"],
        logits: Float[Tensor, "B C"],
        targets: Int[Tensor, "B T"],
        maps: Sequence[Maps],
        options: MapOptions,
    ) -> list[list[list[Trust]]]:
        """A report for each method, image and class. Maps that know no class answer for the predicted one."""
        _, _, scrambled = compute_maps(
            self.scrambled,
            images,
            methods=[of_method.method.name for of_method in maps],
            choose_targets=lambda _: targets,
            options=options,
        )
        grid = maps[0].values.shape[-2:]
        predicted, deletions = logits.argmax(dim=1), {}
        reports = []
        for found, control in zip(maps, scrambled, strict=True):
            columns = []
            for column in range(found.values.shape[1]):
                classes = targets[:, column] if found.method.class_specific else predicted
                key = column if found.method.class_specific else -1
                if key not in deletions:
                    deletions[key] = RandomDeletion(self.model, images, classes, grid=(grid[0], grid[1]))
                values = found.values[:, column]
                gap, beaten = deletions[key].compare(values)
                correlation = rank_correlation(values, control.values[:, column])
                columns.append(
                    [
                        _report(*numbers, patches=grid[0] * grid[1])
                        for numbers in zip(
                            gap.tolist(),
                            beaten.tolist(),
                            correlation.tolist(),
                            found.prefix_mass[:, column].tolist(),
                            found.entropy[:, column].tolist(),
                            strict=True,
                        )
                    ]
                )
            reports.append([list(of_image) for of_image in zip(*columns, strict=True)])
        return reports


class RandomDeletion:
    """Deletion of random patches from a batch of images, to hold maps against."""

    def __init__(
        self,
        model: nn.Module,
        images: Float[Tensor, "B 3 height width"],
        classes: Int[Tensor, " B"],
        *,
        grid: tuple[int, int],
    ) -> None:
        self._predict = build_predictor(model, images, classes, grid=grid)
        generator = torch.Generator().manual_seed(0)  # the same orders for every image: batches don't matter
        orders = [torch.randperm(grid[0] * grid[1], generator=generator) for _ in range(RANDOM_ORDERS)]
        areas = [self._area(order.to(images.device).expand(len(images), -1)) for order in orders]
        self.areas = torch.stack(areas, dim=1)  # [B, orders]

    def compare(
        self, maps: Float[Tensor, "B rows columns"]
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """(gap to the mean random order, share of random orders that do less harm) of each map.

        The share is float64: 9 of 10 in float32 is below `BEATEN_SHARE`.
        """
        area = self._area(maps.flatten(1).argsort(dim=1, descending=True, stable=True))
        return self.areas.mean(dim=1) - area, (self.areas > area[:, None]).double().mean(dim=1)

    def _area(self, order: Int[Tensor, "B P"]) -> Float[Tensor, " B"]:
        return area_under(deletion_curve(self._predict, order, fractions=FRACTIONS), fractions=FRACTIONS)


def scramble(model: nn.Module, *, share_of_blocks: float = 1.0, seed: int = 0) -> nn.Module:
    """A copy whose parameters each have their numbers shuffled: nothing learned is left, but every scale is.

    The head and the last `share_of_blocks` are; with 1 the embedding too. The control of Adebayo et al. 2018;
    shuffled trained weights are harder than fresh ones, whose small numbers make attention uniform and any
    map look different.
    """
    scrambled = copy.deepcopy(model)
    blocks = [layer.block for layer in find_attention_layers(scrambled)]
    of_block = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
    keep_below = round(len(blocks) * (1 - share_of_blocks))
    generator = torch.Generator().manual_seed(seed)
    before = True  # parameters are registered in the order of the walk: embedding, blocks, head
    with torch.no_grad():
        for parameter in scrambled.parameters():
            number = of_block.get(id(parameter))
            before = before and number is None
            kept = share_of_blocks < 1 if before else number is not None and number < keep_below
            if not kept:
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
    return scrambled


def rank_correlation(
    first: Float[Tensor, "B rows columns"], second: Float[Tensor, "B rows columns"]
) -> Float[Tensor, " B"]:
    """Spearman's correlation of each pair of maps, ties sharing their mean rank; 0 where one is constant."""
    left, right = _centred_ranks(first.flatten(1)), _centred_ranks(second.flatten(1))
    norms = left.norm(dim=1) * right.norm(dim=1)
    return torch.where(norms > 0, (left * right).sum(dim=1) / norms.clamp_min(1e-30), 0.0)


def _centred_ranks(values: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
    ordered = values.sort(dim=1).values.contiguous()
    below = torch.searchsorted(ordered, values.contiguous(), side="left")
    up_to = torch.searchsorted(ordered, values.contiguous(), side="right")
    ranks = (below + up_to - 1) / 2
    return ranks - ranks.mean(dim=1, keepdim=True)


def _report(
    deletion_gap: float,
    beaten: float,
    scrambled_correlation: float,
    prefix_mass: float,
    entropy: float,
    *,
    patches: int,
) -> Trust:
    """A report with a sentence for each threshold that the map fails."""
    warnings = []
    if beaten < BEATEN_SHARE:
        warnings.append("no better than random for this image")
    if abs(scrambled_correlation) > max(CORRELATION_LIMIT, 3 / math.sqrt(max(patches - 1, 1))):
        warnings.append(f"predictable from scrambled weights (rank correlation {scrambled_correlation:.2f})")
    if prefix_mass > PREFIX_LIMIT:
        warnings.append(f"{100 * prefix_mass:.0f} % of it is in prefix tokens, not in patches")
    if math.exp(entropy) > UNIFORM_LIMIT * patches:
        warnings.append("nearly uniform")
    return Trust(deletion_gap, beaten, scrambled_correlation, tuple(warnings))
