"""Models that people wrote themselves are read right, or refused in a sentence."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.explanation.capture import hand_written
from tests.explanation.capture.hand_written import (
    MODELS,
    Classifier,
    PairsOfLayers,
    attend_by_products,
    blocks,
    build,
    torch_attention,
)
from vit.explanation.capture.forward import capture_attention
from vit.explanation.methods.maps import METHODS, compute_maps
from vit.explanation.patch_removal import build_removal

ALL = [name for name, method in METHODS.items() if "attention" in method.models]


def compute_reference(
    model: nn.Module, images: Tensor, classes: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's attention and the gradient of the logit with respect to it, in float64."""
    model = model.double()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            monkeypatch.setattr(module, "forward", partial(attend_by_products, module))
    weights: list[Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(hand_written, "reference", weights)
        model(images.double().requires_grad_())[torch.arange(2), classes].sum().backward()
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [weight.detach() for weight in weights], gradients


def find_readout(model: Classifier, num_tokens: int) -> Tensor:
    readout = torch.zeros(num_tokens, dtype=torch.float64)
    if model.pool == "class":
        readout[0] = 1
    else:
        readout[model.special.shape[1] :] = 1 / hand_written.TOKENS
    return readout


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within 1e-4 of the largest value."""
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_attention_maps_are_those_of_the_products_in_float64(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = build(MODELS[name].build)
    with torch.no_grad(), capture_attention(model) as record:
        logits = model(images)
    methods = ["rollout", "gae"]
    forward, classes, maps = compute_maps(model, images, methods=methods)
    torch.testing.assert_close(forward.logits.detach(), logits)
    assert forward.reader.can_drop_tokens == MODELS[name].drops_tokens

    attentions, gradients = compute_reference(model, images, classes[:, 0], monkeypatch)
    for found, expected in zip(record.attentions, attentions, strict=True):
        assert (found - expected).abs().max() < 1e-5
    products = [a * g for a, g in zip(attentions, gradients, strict=True)]
    if name == "weighted mean":  # its readout depends on the tokens
        return
    rollout = find_readout(model, attentions[0].shape[-1]).expand(2, 1, -1)
    gae = rollout
    for attention, product in zip(attentions[::-1], products[::-1], strict=True):
        rollout = (rollout + rollout @ attention.mean(dim=1)) / 2
        gae = gae + gae @ product.clamp_min(0).mean(dim=1)
    gae = gae - find_readout(model, attentions[0].shape[-1])
    for found, expected in zip(maps, (rollout, gae), strict=True):
        prefix = forward.num_prefix_tokens
        assert_close(found[:, 0].flatten(1), expected[:, 0, prefix:])


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_an_encoder_that_adds_is_read_as_the_same_blocks_are(pool: str) -> None:
    """The tokens between the blocks are found, and every method, removal too, gives the same."""
    outside = torch_attention(batch_first=False, need_weights=False)
    inside = torch_attention(batch_first=True, need_weights=True)
    encoder = PairsOfLayers(outside, norm=False)
    adds, images = build(lambda: Classifier(encoder, pool=pool))
    whole, _ = build(lambda: Classifier(blocks(inside), pool=pool))
    for block, (attention, feed_forward) in zip(whole.encoder, encoder.layers, strict=True):
        block.attention.load_state_dict(attention.fn.state_dict())
        block.ln1 = attention.norm
        block.mlp, block.ln2 = feed_forward.fn, feed_forward.norm
    for name in ("patchify", "special", "pos", "head"):
        setattr(whole, name, getattr(adds, name))
    maps = []
    for model in (adds, whole):
        forward, _, found = compute_maps(model, images, methods=ALL)
        remove = build_removal(forward.reader, images, grid=forward.grid)
        kept = remove(torch.tensor([0, 1]), torch.tensor([[1, 3, 7], [5, 4, 0]]))
        maps.append([kept, *found])
    for one, other in zip(*maps, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
