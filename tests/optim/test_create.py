"""Optimizers by name."""

import pytest
import torch

from vit.optim import create_optimizer


def build_model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_every_optimizer_stands_still_where_the_first_gradient_is_not_finite(name):
    """torch's fused SGD keeps uninitialised momentum in that case."""
    model, clean = build_model(), build_model()
    optimizers = [create_optimizer(name, part, lr=0.1, momentum=0.9) for part in (model, clean)]
    before = model.weight.detach().clone()
    model(torch.full((2, 4), float("nan"))).sum().backward()
    optimizers[0].found_inf = torch.ones(())
    optimizers[0].step()
    assert torch.equal(model.weight, before)
    optimizers[0].found_inf = torch.zeros(())
    for _ in range(2):
        for part, optimizer in zip((model, clean), optimizers, strict=True):
            optimizer.zero_grad()
            part(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, clean.weight, rtol=0, atol=0)


def test_sgd_uses_nesterov_momentum():
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = create_optimizer("sgd", model, lr=1.0, momentum=0.5)
    seen = []
    for _ in range(2):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        seen.append(model.weight.item())
    # buffer 1, then 1.5; updates g + μ·buffer: 1.5, then 1.75
    assert seen == [-1.5, -3.25]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown optimizer 'lion'; known: adamw, muon, sgd"):
        create_optimizer("lion", build_model(), lr=0.1)
