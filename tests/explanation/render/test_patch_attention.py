"""Rows for pointing at patches are those of the matrices, in eight bits, within their budget."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture.readout import run_forward
from vit.explanation.methods.rollout import attention_rollout
from vit.explanation.render.patch_attention import collect_rows

Build = Callable[..., tuple[nn.Module, Tensor]]
PATCHES, LAYERS, HEADS = 24, 3, 3


def test_rows_are_the_matrices_to_eight_bits(ours: Build) -> None:
    model, images = ours()
    forward = run_forward(model, images)
    rows = {of_matrix.name: of_matrix for of_matrix in collect_rows(forward, 1, budget=10**6)}
    attentions = [attention[1:2] for attention in forward.record.attentions]
    expected = {
        "rollout": attention_rollout(attentions)[0, 1:, 1:],
        "layer 2": attentions[2][0].mean(dim=0)[1:, 1:],
        "layer 0 head 1": attentions[0][0, 1, 1:, 1:],
    }
    for name, matrix in expected.items():
        restored = torch.from_numpy(rows[name].rows / 255.0 * rows[name].maxima[:, None])
        assert ((restored - matrix).abs().amax(dim=1) <= matrix.amax(dim=1) / 510 + 1e-7).all()
    assert len(rows) == 1 + LAYERS + LAYERS * HEADS


@pytest.mark.parametrize(
    ("matrices", "names"),
    [
        (1 + LAYERS + LAYERS * HEADS, ["rollout", "layer 0", "layer 0 head 0"]),
        (1 + LAYERS, ["rollout", "layer 0"]),
        (1, ["rollout"]),
        (0, []),
    ],
)
def test_what_does_not_fit_is_left_out_in_order(ours: Build, matrices: int, names: list[str]) -> None:
    model, images = ours()
    rows = collect_rows(run_forward(model, images), 0, budget=matrices * PATCHES**2)
    kinds = [row.name for row in rows if row.name in ("rollout", "layer 0", "layer 0 head 0")]
    assert kinds == names
    assert sum(row.rows.size for row in rows) <= matrices * PATCHES**2


def test_layers_become_coarser_before_they_go(ours: Build) -> None:
    model, images = ours()
    rows = collect_rows(run_forward(model, images), 0, budget=PATCHES**2 + LAYERS * PATCHES * 6)
    assert [row.name for row in rows] == ["rollout", "layer 0", "layer 1", "layer 2"]
    assert rows[1].grid == (2, 3)  # of 4×6 patches
    assert rows[1].rows.shape == (PATCHES, 6)
    assert np.isfinite(rows[1].maxima).all()


def test_rollout_of_a_fine_grid_becomes_coarser_too(ours: Build) -> None:
    model, images = ours()
    (rollout,) = collect_rows(run_forward(model, images), 0, budget=PATCHES * 6)
    assert (rollout.name, rollout.grid) == ("rollout", (2, 3))
