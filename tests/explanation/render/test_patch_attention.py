"""Per-patch attention is that of the matrices, in eight bits, within their budget."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture.readout import run_forward
from vit.explanation.methods.rollout import attention_rollout
from vit.explanation.render.patch_attention import collect_patch_attention

Build = Callable[..., tuple[nn.Module, Tensor]]
PATCHES, LAYERS, HEADS = 24, 3, 3


def test_rows_are_the_matrices_to_eight_bits(ours: Build) -> None:
    model, images = ours()
    forward = run_forward(model, images)
    rows = {(each.layer, each.head): each for each in collect_patch_attention(forward, 1, budget=10**6)}
    attentions = [attention[1:2] for attention in forward.record.attentions]
    expected = {
        (None, None): attention_rollout(attentions)[0, 1:, 1:],
        (2, None): attentions[2][0].mean(dim=0)[1:, 1:],
        (0, 1): attentions[0][0, 1, 1:, 1:],
    }
    for name, matrix in expected.items():
        restored = torch.from_numpy(rows[name].values / 255.0 * rows[name].maxima[:, None])
        assert ((restored - matrix).abs().amax(dim=1) <= matrix.amax(dim=1) / 510 + 1e-7).all()
    assert len(rows) == 1 + LAYERS + LAYERS * HEADS


@pytest.mark.parametrize(
    ("matrices", "names"),
    [
        (1 + LAYERS + LAYERS * HEADS, [(None, None), (0, None), (0, 0)]),
        (1 + LAYERS, [(None, None), (0, None)]),
        (1, [(None, None)]),
        (0, []),
    ],
)
def test_what_does_not_fit_is_left_out_in_order(
    ours: Build, matrices: int, names: list[tuple[int | None, int | None]]
) -> None:
    model, images = ours()
    rows = collect_patch_attention(run_forward(model, images), 0, budget=matrices * PATCHES**2)
    kinds = [(row.layer, row.head) for row in rows if row.layer in (None, 0) and row.head in (None, 0)]
    assert kinds == names
    assert sum(row.values.size for row in rows) <= matrices * PATCHES**2


def test_layers_become_coarser_before_they_go(ours: Build) -> None:
    model, images = ours()
    rows = collect_patch_attention(run_forward(model, images), 0, budget=PATCHES**2 + LAYERS * PATCHES * 6)
    assert [row.layer for row in rows] == [None, 0, 1, 2]
    assert rows[1].grid == (2, 3)  # of 4×6 patches
    assert rows[1].values.shape == (PATCHES, 6)
    assert np.isfinite(rows[1].maxima).all()


def test_rollout_of_a_fine_grid_becomes_coarser_too(ours: Build) -> None:
    model, images = ours()
    (rollout,) = collect_patch_attention(run_forward(model, images), 0, budget=PATCHES * 6)
    assert (rollout.layer, rollout.grid) == (None, (2, 3))
