"""Attention sinks: found in attention that is made by hand, and nowhere else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import vit
from tests.explanation import model_zoo
from tests.explanation.conftest import Trained
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.capture.forward import AttentionRecord, Forward, run_forward
from vit.explanation.capture.layers import AttentionLayer, LayerPlace
from vit.explanation.capture.reader import ModelReader
from vit.explanation.methods import sinks
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.registry import METHODS
from vit.explanation.methods.rollout import compute_rollout
from vit.explanation.methods.sinks import count_sinks, find_sinks
from vit.explanation.records import MapResult

Build = Callable[..., tuple[nn.Module, Tensor]]

GRID = (10, 12)
NUM_PREFIX, NUM_PATCHES = 1, 120
NUM_TOKENS = NUM_PREFIX + NUM_PATCHES
SINK = 37  # row 3, column 1


class MadeLayer(AttentionLayer):
    """A layer whose attention is given, the softmax of its logarithm, and what it moves."""

    def __init__(self, attention: Tensor, norms: Tensor) -> None:
        super().__init__(LayerPlace(MadeLayer, "made", nn.Identity(), nn.Identity(), 2))
        self.made = attention  # [B, H, N, N]
        self.norms = norms  # [N]
        self.captured = True
        self.batch, self.num_tokens = len(attention), attention.shape[-1]
        self.num_queries = self.num_tokens

    chunk_elements = 2 * NUM_TOKENS**2  # an image at a time

    def query_and_key(self, images: slice) -> tuple[Tensor, Tensor]:
        query = self.made[images].log()
        return query, torch.eye(query.shape[-1]).expand_as(query)

    def value_norms(self, images: slice = slice(None)) -> Tensor:
        return self.norms.expand(len(self.made[images]), 2, -1)


def make_forward(*attentions: Tensor, norm_of_sink: float = 0.3) -> Forward:
    """A pass of two heads, from each layer's [B, N, N]."""
    norms = torch.ones(NUM_TOKENS)
    norms[NUM_PREFIX + SINK] = norm_of_sink
    layers = [
        MadeLayer(attention[:, None].expand(-1, 2, -1, -1), norms) for attention in attentions
    ]
    return Forward(
        reader=ModelReader(nn.Identity()),
        images=torch.zeros(2, 3, 10, 12),
        logits=torch.zeros(2, 2),
        record=AttentionRecord(layers),
        pool_weights=torch.zeros(2, NUM_TOKENS),
        num_prefix_tokens=NUM_PREFIX,
        grid=GRID,
        tokens=torch.zeros(2, NUM_TOKENS, 4),
        pooling={},
    )


def make_even() -> Tensor:
    return torch.full((2, NUM_TOKENS, NUM_TOKENS), 1 / NUM_TOKENS)


def draw(attention: Tensor, token: int, share: float, *, from_queries: slice) -> Tensor:
    """`attention` whose queries give `share` to a token, and the rest to all as before."""
    attention = attention.clone()
    attention[:, from_queries] *= 1 - share
    attention[:, from_queries, token] += share
    return attention


def test_a_patch_that_all_attend_to_is_found_in_its_layer() -> None:
    sink = draw(make_even(), NUM_PREFIX + SINK, 0.2, from_queries=slice(None))
    sink[1] = make_even()[1]  # in the first image alone

    found = find_sinks(make_forward(make_even(), sink, make_even()))

    assert found.shape == (2, 3, *GRID)
    assert found.nonzero().tolist() == [[0, 1, 3, 1]]
    # from the second layer on it is in the first of those looked at
    later = find_sinks(make_forward(make_even(), sink, make_even()), start_layer=1)
    assert later.nonzero().tolist() == [[0, 0, 3, 1]]


def test_sinks_are_the_same_where_a_rollout_noted_what_patches_draw() -> None:
    """Layers in which none draws enough are not looked at again."""
    sink = draw(make_even(), NUM_PREFIX + SINK, 0.2, from_queries=slice(None))
    forward = make_forward(make_even(), sink, make_even())
    found = find_sinks(forward)

    compute_rollout(forward, forward.logits)

    drawn = [layer.max_drawn for layer in forward.record.layers]
    assert drawn == pytest.approx([1.0, 0.2 * NUM_TOKENS + 0.8, 1.0], rel=1e-4)
    forward.record.layers[0].query_and_key = forward.record.layers[2].query_and_key = None  # type: ignore[assignment, method-assign]
    assert torch.equal(find_sinks(forward), found)
    assert found.any()


def test_a_patch_that_some_look_at_is_none() -> None:
    """It draws as much, 0.2 of all attention, from a fifth of the queries."""
    looked_at = draw(make_even(), NUM_PREFIX + SINK, 0.99, from_queries=slice(1, 25))
    mean = looked_at[0, 1:, NUM_PREFIX + SINK].mean() * NUM_TOKENS
    assert mean > sinks.MIN_DRAWN

    assert not find_sinks(make_forward(looked_at)).any()


def test_a_patch_that_all_look_at_is_none() -> None:
    """All queries give it a fifth, and what they read there is as large as elsewhere."""
    looked_at = draw(make_even(), NUM_PREFIX + SINK, 0.2, from_queries=slice(None))

    assert find_sinks(make_forward(looked_at)).any()
    assert not find_sinks(make_forward(looked_at, norm_of_sink=1.0)).any()


def test_what_attention_moves_is_the_norm_of_the_projected_value(build: Build) -> None:
    """Against the module itself, with one value at a time in the place of its heads."""
    for family in ("ours", "timm"):
        model, images = build(family)
        layer = run_forward(model, images, gradients=True).record.layers[1]
        assert layer.tokens is not None
        value = layer.module.qkv(layer.tokens).chunk(3, dim=-1)[2]
        width = value.shape[-1] // layer.num_heads
        norms = layer.value_norms()
        for head in range(layer.num_heads):
            alone = torch.zeros_like(value)
            columns = slice(head * width, (head + 1) * width)
            alone[..., columns] = value[..., columns]
            moved = alone.double() @ layer.module.proj.weight.double().T
            expected = moved.norm(dim=-1)
            torch.testing.assert_close(norms[:, head].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", model_zoo.MODELS)
def test_what_attention_moves_is_known_of_every_family(build: Build, family: str) -> None:
    model, images = build(family)
    layers = run_forward(model, images, verify=False).record.layers
    for layer in (layers[0], layers[-1]):
        norms = layer.value_norms()
        assert norms.shape == (2, layer.num_heads, layer.num_tokens)
        assert (norms > 0).all()
        assert norms.isfinite().all()


def test_even_and_random_attention_has_none() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(2, NUM_TOKENS, NUM_TOKENS, generator=generator)

    assert not find_sinks(make_forward(make_even(), scores.softmax(dim=-1))).any()


def test_the_class_token_is_none() -> None:
    class_token = draw(make_even(), 0, 0.5, from_queries=slice(None))

    assert not find_sinks(make_forward(class_token)).any()


@pytest.mark.extended
def test_a_model_with_planted_evidence_has_none(trained: Trained) -> None:
    """The glyph is looked at, by all."""
    forward = run_forward(trained.model, trained.images)

    assert not find_sinks(forward).any()


@pytest.fixture
def explain_planted(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[MapResult]]:
    """Rollouts of three images, with bounds that make sinks of many patches."""
    monkeypatch.setattr(sinks, "MIN_DRAWN", 1.2)
    monkeypatch.setattr(sinks, "MAX_MOVED", 9.0)
    names = [str(number) for number in range(11)]
    bundle = Bundle(trained.model, Preprocess(image_size=(24, 24)), names, "planted", "0" * 64)
    pixels = ((trained.images[:3] + 0.3) * 255).byte().permute(0, 2, 3, 1).numpy()

    def explain(**options: object) -> list[MapResult]:
        explanations = vit.explain(bundle, list(pixels), methods="rollout", map_options=options)
        return [image.maps[0] for image in explanations.images]

    return explain


def test_maps_say_what_their_sinks_hold(
    explain_planted: Callable[..., list[MapResult]],
) -> None:
    for result in explain_planted():
        held = [result.values[sink.row, sink.column] for sink in result.sinks]
        assert held
        assert held == sorted(held, reverse=True)
        assert result.sink_fraction == pytest.approx(sum(held) / result.values.sum())
        assert f"{100 * result.sink_fraction:.0f} % of the map" in result.describe_sinks()
        assert str(result.sinks[0]) in result.describe_sinks()

        without = replace(result, sinks=())
        assert without.sink_fraction == 0
        assert without.describe_sinks() == ""


def test_layers_are_named_as_the_model_has_them(
    explain_planted: Callable[..., list[MapResult]],
) -> None:
    maps = explain_planted(start_layer=1)

    assert {layer for result in maps for sink in result.sinks for layer in sink.layers} == {1, 2}


def test_methods_of_gradients_have_none(trained: Trained) -> None:
    """A gradient weighs what attention moves: a sink moves next to nothing."""
    with_sinks = {method.name for method in METHODS.values() if method.has_sinks}
    _, _, (rollout, gae) = compute_maps(
        trained.model, trained.images[:2], methods=["rollout", "gae"]
    )

    assert with_sinks == {"rollout"}
    assert rollout.sinks is not None
    assert gae.sinks is None


def test_sinks_are_counted_over_images() -> None:
    lines = count_sinks({"rollout": [0.08, 0.0, 0.12, 0.11], "gae": [0.0]})

    assert lines == [
        "rollout has attention sinks on 3 of 4 images; they hold 11 % of the map (median)"
    ]
