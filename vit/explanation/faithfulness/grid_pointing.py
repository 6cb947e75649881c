"""The grid pointing game (Böhle et al. 2021): on a 2×2 mosaic of four classes, the fraction of a class's positive
relevance that lies in its own quarter. By chance it is 0.25."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vit.explanation.faithfulness.map_metrics import compute_pointing
from vit.explanation.faithfulness.token_ablation import Classify


def build_mosaics(
    images: Float[Tensor, "n 3 height width"], classes: Int[Tensor, " n"], *, count: int, seed: int
) -> tuple[Float[Tensor, "m 3 H W"], Int[Tensor, "m 4"]]:
    """2×2 mosaics of images of four different classes, and the classes in reading order."""
    random, labels = np.random.default_rng(seed), classes.cpu().numpy()
    known = np.unique(labels)
    if len(known) < 4:
        return images.new_zeros(0, 3, 2 * images.shape[2], 2 * images.shape[3]), classes.new_zeros(0, 4)
    mosaics, targets = [], []
    for _ in range(count):
        chosen = random.choice(known, 4, replace=False)
        four = [images[random.choice(np.flatnonzero(labels == label))] for label in chosen]
        mosaics.append(torch.cat([torch.cat(four[:2], dim=-1), torch.cat(four[2:], dim=-1)], dim=-2))
        targets.append(torch.from_numpy(chosen))
    return torch.stack(mosaics), torch.stack(targets).to(classes.device)


def point(of_quarters: Sequence[Float[Tensor, "m r c"]]) -> Float[Tensor, " m"]:
    """The mean over the four quarters of the fraction that the map of each quarter's class has in it."""
    rows, columns = of_quarters[0].shape[1:]
    fractions = []
    for quarter, maps in enumerate(of_quarters):
        inside = torch.zeros_like(maps, dtype=torch.bool)
        top, left = quarter // 2 * (rows // 2), quarter % 2 * (columns // 2)
        inside[:, top : top + rows // 2, left : left + columns // 2] = True
        fractions.append(compute_pointing(maps, inside))
    return torch.stack(fractions).mean(dim=0)


def leave_blocks_out(
    classify: Classify, targets: Int[Tensor, "m 4"], *, grid: tuple[int, int]
) -> Float[Tensor, "m 4 r c"]:
    """For each quarter's class, the drop of its logit when a block of 2×2 patches is left out."""
    patches = torch.arange(grid[0] * grid[1], device=targets.device).reshape(grid)
    whole = classify(patches.flatten().expand(len(targets), -1)).gather(1, targets)
    drops = whole.new_zeros(len(targets), 4, patches.numel())
    for row in range(0, grid[0], 2):
        for column in range(0, grid[1], 2):
            block = patches[row : row + 2, column : column + 2].flatten()
            kept = patches[~torch.isin(patches, block)]
            without = classify(kept.expand(len(targets), -1)).gather(1, targets)
            drops[:, :, block] = (whole - without)[:, :, None]
    return torch.unflatten(drops, 2, grid)
