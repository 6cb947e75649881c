"""Sanity checks of every map: how far may it be believed for this image?

Three questions, each with a threshold: does deleting the patches that the map ranks highest lower the class's
probability more than deleting patches in a random order? Does the map change when the model's weights are randomised?
Is the relevance in the patches at all? They cost about 25 forward passes an image and one more map."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit.explanation.capture.capture import find_attention_layers
from vit.explanation.capture.readout import Grid, Images, PatchMaps
from vit.explanation.faithfulness.map_metrics import find_order
from vit.explanation.faithfulness.token_ablation import area_under, build_predictor, deletion_curve
from vit.explanation.methods.table import MapOptions, Maps, compute_maps

RANDOM_ORDERS = 10
LEAST_BETTER = 0.9  # than random orders; a random map reaches it for about one image in six
FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the patches, deleted
CORRELATION_LIMIT = 0.3  # with the map of randomised weights, or three standard errors where that is more
PREFIX_LIMIT = 0.5
VERDICTS = ("supported", "weak", "unsupported", "not checked")
UNIFORM_LIMIT = 0.98  # exp(entropy) / patches


@dataclass(frozen=True)
class SanityCheck:
    """The checks of one map and what follows from them."""

    verdict: str  # one of VERDICTS
    reason: str  # a sentence
    deletion_gap: float  # mean probability of the class under random deletion minus that in the map's order
    better_than_random: float  # fraction of the random orders that lower the probability less
    randomised_correlation: float  # Spearman's, with the same method's map of randomised weights
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {**asdict(self), "warnings": list(self.warnings)}


class SanityChecker:
    """Checks the maps of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.randomised = randomise_weights(model)

    def check(
        self,
        images: Images,
        logits: Float[Tensor, "B C"],
        targets: Int[Tensor, "B T"],
        maps: Sequence[Maps],
        options: MapOptions,
    ) -> list[list[list[SanityCheck]]]:
        """By method, image and class. Maps that don't depend on the class are checked for the predicted one."""
        names = [of_method.method.name for of_method in maps]
        _, _, randomised_maps = compute_maps(
            self.randomised, images, methods=names, choose_targets=lambda _: targets, options=options
        )
        rows, columns = maps[0].values.shape[-2:]
        deletions: dict[int, RandomDeletion] = {}
        checks = []
        for found, other in zip(maps, randomised_maps, strict=True):
            by_class = []
            for column in range(found.values.shape[1]):
                key = column if found.method.class_specific else -1
                if key not in deletions:
                    classes = logits.argmax(dim=1) if key < 0 else targets[:, column]
                    deletions[key] = RandomDeletion(self.model, images, classes, grid=(rows, columns))
                values, of_randomised = found.values[:, column], other.values[:, column]
                numbers = [*deletions[key].compare(values), rank_correlation(values, of_randomised)]
                numbers += [found.prefix_mass[:, column], found.entropy[:, column]]
                of_images = zip(*(of_all.tolist() for of_all in numbers), strict=True)
                by_class.append([_judge(*of_image, patches=rows * columns) for of_image in of_images])
            checks.append([list(of_image) for of_image in zip(*by_class, strict=True)])
        return checks


class RandomDeletion:
    """Deletion of patches in random orders from a batch of images, to compare maps with."""

    def __init__(self, model: nn.Module, images: Images, classes: Int[Tensor, " B"], *, grid: Grid) -> None:
        self._predict = build_predictor(model, images, classes, grid=grid)
        generator = torch.Generator().manual_seed(0)  # the same orders for every image: batches don't matter
        orders = [torch.randperm(grid[0] * grid[1], generator=generator) for _ in range(RANDOM_ORDERS)]
        areas = [self._area(order.to(images.device).expand(len(images), -1)) for order in orders]
        self.areas = torch.stack(areas, dim=1)  # [B, orders]

    def compare(self, maps: PatchMaps) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """(gap to the mean random order, fraction of random orders that lower the probability less) of each map; the
        fraction is float64: 9 of 10 in float32 is below `LEAST_BETTER`."""
        area = self._area(find_order(maps))
        return self.areas.mean(dim=1) - area, (self.areas > area[:, None]).double().mean(dim=1)

    def _area(self, order: Int[Tensor, "B P"]) -> Float[Tensor, " B"]:
        return area_under(deletion_curve(self._predict, order, fractions=FRACTIONS), fractions=FRACTIONS)


def randomise_weights(model: nn.Module, *, fraction_of_blocks: float = 1.0, seed: int = 0) -> nn.Module:
    """A copy whose parameters each have their numbers shuffled: nothing learned is left, but every scale is.

    The head and the last `fraction_of_blocks` of the blocks are shuffled; with 1 the embedding too (Adebayo et al.
    2018). Shuffled trained weights are a harder check than fresh ones, whose small numbers make attention uniform and
    any map different."""
    randomised = copy.deepcopy(model)
    blocks = [layer.block for layer in find_attention_layers(randomised)]
    of_block = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
    keep_below = round(len(blocks) * (1 - fraction_of_blocks))
    generator = torch.Generator().manual_seed(seed)
    before = True  # parameters() goes from the front of the model to its back: embedding, blocks, head
    with torch.no_grad():
        for parameter in randomised.parameters():
            number = of_block.get(id(parameter))
            before = before and number is None
            kept = fraction_of_blocks < 1 if before else number is not None and number < keep_below
            if not kept:
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
    return randomised


def rank_correlation(first: PatchMaps, second: PatchMaps) -> Float[Tensor, " B"]:
    """Spearman's correlation of each pair of maps, ties sharing their mean rank; 0 where one is constant."""
    left, right = _centred_ranks(first.flatten(1)), _centred_ranks(second.flatten(1))
    norms = left.norm(dim=1) * right.norm(dim=1)
    return torch.where(norms > 0, (left * right).sum(dim=1) / norms.clamp_min(1e-30), 0.0)


def _centred_ranks(values: Float[Tensor, "B P"]) -> Float[Tensor, "B P"]:
    values = values.contiguous()
    ordered = values.sort(dim=1).values
    ranks = (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True) - 1) / 2
    return ranks - ranks.mean(dim=1, keepdim=True)


def _judge(
    deletion_gap: float,
    better_than_random: float,
    randomised_correlation: float,
    prefix_mass: float,
    entropy: float,
    *,
    patches: int,
) -> SanityCheck:
    """The numbers with a sentence for each threshold that the map fails."""
    warnings = []
    if better_than_random < LEAST_BETTER:
        warnings.append("no better than random for this image")
    if abs(randomised_correlation) > max(CORRELATION_LIMIT, 3 / math.sqrt(max(patches - 1, 1))):
        warnings.append(f"similar with randomised weights (rank correlation {randomised_correlation:.2f})")
    if prefix_mass > PREFIX_LIMIT:
        warnings.append(f"{100 * prefix_mass:.0f} % of the relevance is in prefix tokens, not in patches")
    if math.exp(entropy) > UNIFORM_LIMIT * patches:
        warnings.append("nearly uniform")
    verdict = "unsupported" if better_than_random < LEAST_BETTER else "weak" if warnings else "supported"
    reason = "; ".join(warnings) or "its order lowers the probability more than random orders"
    return SanityCheck(verdict, reason, deletion_gap, better_than_random, randomised_correlation, tuple(warnings))
