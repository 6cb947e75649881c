"""Optimizers by name."""

import copy

import pytest
import torch

from tests.pretend_device import pretend_device
from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer


def build_model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_every_optimizer_stands_still_where_the_first_gradient_is_not_finite(name):
    """torch's fused SGD would keep uninitialised momentum in that case."""
    model, clean = build_model(), build_model()
    optimizers = [create_optimizer(name, part, lr=0.1) for part in (model, clean)]
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
    optimizer = create_optimizer("sgd", model, lr=1.0)
    seen = []
    for _ in range(2):
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        seen.append(model.weight.item())
    # buffer 1, then 1.95; updates g + 0.95 · buffer: 1.95, then 2.8525
    assert seen == pytest.approx([-1.95, -4.8025])


def build_vit(depth=1):
    torch.manual_seed(0)
    return VisionTransformer(8, 4, num_classes=5, embed_dim=16, depth=depth, num_heads=2)


def train_one_step(model, optimizer):
    for parameter in model.parameters():
        gradient = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape)
        parameter.grad = gradient.to(parameter.device)
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_state_that_is_restored_goes_to_its_parameters_device(name):
    """Checkpoints are read on the CPU, and CUDA's fused optimizers take no count of steps from
    there. torch moves it where a group is marked as fused."""
    model = build_vit()
    optimizer = create_optimizer(name, model, lr=0.01)
    train_one_step(model, optimizer)
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train_one_step(model, optimizer)

    with pretend_device():
        resumed = build_vit().to("npu")
        resumed.load_state_dict(weights)
        restored = create_optimizer(name, resumed, lr=0.01)
        restored.load_state_dict(state)
        devices = {
            value.device.type
            for values in restored.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        }
        assert devices == {"npu"}
        train_one_step(resumed, restored)
        for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=1e-6)
