"""Attention of tokens is that of the matrices, in eight bits, within its budget; the logit lens is
the classifier's."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.methods.rollout import attention_rollout
from vit.explanation.render.token_details import (
    QuantisedRows,
    TokenDetails,
    measure_tokens,
)

Build = Callable[..., tuple[nn.Module, Tensor]]
PATCHES, LAYERS, HEADS, TOKENS = 24, 3, 3, 25
# bytes of what comes before attention: the lens of two classes, and pooled rows
BEFORE = 5 * LAYERS * TOKENS + LAYERS * HEADS * TOKENS


def collect(forward: Forward, image: int = 1, *, budget: int = 10**6) -> TokenDetails:
    return measure_tokens(
        forward,
        image,
        targets=torch.tensor([3, 1]),
        max_bytes=budget,
        to_probabilities=lambda logits: (logits / 2.0).softmax(dim=1),
    )


def restore(rows: QuantisedRows, num_prefix: int) -> Tensor:
    counts = torch.tensor([num_prefix, rows.values.shape[1] - num_prefix])
    return rows.values.double() / 255.0 * rows.maxima.double().repeat_interleave(counts, dim=1)


@pytest.mark.parametrize("registers", [0, 4])
def test_rows_are_the_matrices_to_eight_bits(ours: Build, registers: int) -> None:
    model, images = ours(reg_tokens=registers)
    forward = run_forward(model, images)
    details = collect(forward)
    rows = {(each.layer, each.head): each.rows for each in details.attention}
    attentions = [attention[1:2] for attention in forward.record.attentions]
    expected = {
        (None, None): attention_rollout(attentions)[0],
        (2, None): attentions[2][0].mean(dim=0),
        (0, 1): attentions[0][0, 1],
    }
    for name, matrix in expected.items():
        restored = restore(rows[name], 1 + registers)
        for part in (
            slice(1 + registers),
            slice(1 + registers, None),
        ):  # each has a scale of its own
            assert (
                (restored - matrix)[:, part]
                .abs()
                .amax(1)
                .le(matrix[:, part].amax(1) / 510 + 1e-7)
                .all()
            )
    assert len(rows) == 1 + LAYERS + LAYERS * HEADS
    assert details.prefix_names == (
        "class token",
        *(f"register {n}" for n in range(1, 1 + registers)),
    )


def test_rollout_has_the_options_of_the_map(ours: Build) -> None:
    model, images = ours(reg_tokens=2)
    forward = run_forward(model, images)
    options = {"head_fusion": "max", "discard_ratio": 0.5, "residual": 0.2, "start_layer": 1}
    details = measure_tokens(
        forward,
        1,
        targets=torch.tensor([3, 1]),
        max_bytes=10**6,
        rollout_options=options,
    )
    attentions = [attention[1:2] for attention in forward.record.attentions]
    expected = attention_rollout(
        attentions,
        head_fusion="max",
        discard_ratio=0.5,
        residual=0.2,
        start_layer=1,
        num_prefix_tokens=3,
    )[0]
    by_default = attention_rollout(attentions)[0]
    rows = {(each.layer, each.head): each.rows for each in details.attention}
    restored = restore(rows[None, None], 3)
    assert (restored - expected).abs().max() <= expected.max() / 510 + 1e-7
    assert (by_default - expected).abs().max() > 0.05
    # of a layer the mean over the heads is shown, as ever
    mean = attentions[2][0].mean(dim=0)
    assert (restore(rows[2, None], 3) - mean).abs().max() <= mean.max() / 510 + 1e-7


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_pooled_rows_are_what_the_classifier_reads(ours: Build, pool: str) -> None:
    model, images = ours(global_pool=pool)
    forward = run_forward(model, images)
    found = collect(forward).pooled
    expected = torch.cat(
        [
            torch.einsum("n,hnm->hm", forward.pool_weights[1], a[1])
            for a in forward.record.attentions
        ]
    )
    assert (
        restore(found, forward.num_prefix_tokens) - expected
    ).abs().amax() <= expected.amax() / 510 + 1e-7
    assert len(found.values) == LAYERS * HEADS


def test_the_lens_after_the_last_layer_is_the_models_own_answer(ours: Build) -> None:
    """Where the class token is read, it alone gives the prediction; the rest is the classifier on
    each token."""
    model, images = ours()
    forward = run_forward(model, images, block_tokens=True)
    lens = collect(forward).lens
    expected = (forward.logits[1] / 2.0).softmax(dim=0)
    assert lens.classes[-1, 0] == expected.argmax()
    assert lens.probabilities[-1, 0] == pytest.approx(expected.max().item(), abs=1e-6)
    assert lens.target_probabilities[:, -1, 0] == pytest.approx(
        expected[[3, 1]].detach().numpy(), abs=1e-6
    )
    with torch.no_grad():
        tokens = forward.record.layers[0].block_tokens[1]
        early = (model.head(model.norm(tokens)) / 2.0).softmax(dim=1)
    assert np.array_equal(lens.classes[0], early.argmax(dim=1))
    assert np.allclose(lens.target_probabilities[:, 0], early[:, [3, 1]].T, atol=1e-6)
    assert lens.classes.shape == (LAYERS, TOKENS)


@pytest.mark.parametrize(
    "family", ["timm", "torchvision", "hugging-face", "timm-eva", "ours-registers-norms"]
)
def test_every_family_has_its_tokens(
    build: Callable[[str], tuple[nn.Module, Tensor]], family: str
) -> None:
    model, images = build(family)
    forward = run_forward(model, images, block_tokens=True)
    details = collect(forward, 0)
    tokens = forward.num_prefix_tokens + forward.grid[0] * forward.grid[1]
    assert details.lens.classes.shape == (details.num_layers, tokens)
    assert details.attention[0].rows.values.shape == (tokens, tokens)
    assert len(details.prefix_names) == forward.num_prefix_tokens


def test_without_the_tokens_of_blocks_or_a_known_classifier_there_is_no_lens(
    ours: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = ours()
    assert collect(run_forward(model, images)).lens is None
    forward = run_forward(model, images, block_tokens=True)
    assert collect(forward).lens is not None
    assert collect(forward, budget=5 * LAYERS * TOKENS).lens is not None
    assert collect(forward, budget=5 * LAYERS * TOKENS - 1).lens is None

    def refuse(*args: object) -> None:
        raise ValueError("has no classifier")

    monkeypatch.setattr("vit.explanation.render.token_details.classify_token", refuse)
    assert collect(forward).lens is None


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
    found = collect(run_forward(model, images), budget=BEFORE + matrices * TOKENS**2).attention
    kinds = [
        (each.layer, each.head)
        for each in found
        if each.layer in (None, 0) and each.head in (None, 0)
    ]
    assert kinds == names
    assert sum(each.rows.values.numel() for each in found) <= matrices * TOKENS**2


def test_layers_or_heads_that_do_not_all_fit_are_all_left_out(ours: Build) -> None:
    model, images = ours()
    forward = run_forward(model, images)
    without_last_layer = BEFORE + LAYERS * TOKENS**2
    details = collect(forward, budget=without_last_layer).attention
    assert [each.layer for each in details] == [None]
    without_last_head = BEFORE + (LAYERS + LAYERS * HEADS) * TOKENS**2
    details = collect(forward, budget=without_last_head).attention
    assert [each.layer for each in details] == [None, 0, 1, 2]
    assert {each.rows.values.shape for each in details} == {(TOKENS, TOKENS)}


def test_the_whole_keeps_to_its_budget(ours: Build) -> None:
    model, images = ours()
    forward = run_forward(model, images, block_tokens=True)
    for budget in (100, 1000, 3000, 10_000, 50_000):
        found = collect(forward, budget=budget)
        lens = 0 if found.lens is None else 5 * found.lens.classes.numel()
        rows = [each.rows for each in found.attention] + ([found.pooled] if found.pooled else [])
        assert lens + sum(each.values.numel() for each in rows) <= budget
