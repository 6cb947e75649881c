"""Muon against singular value decompositions, torch's own Muon and AdamW."""

import copy

import pytest
import torch

from vit.optim.muon import Muon, orthogonalize
from vit.optim.optimizer import parameter_groups


def quintic(values: torch.Tensor) -> torch.Tensor:
    """What five steps make of singular values, one by one."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def build_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    block = torch.nn.ModuleDict(
        {
            "attn": torch.nn.ModuleDict(
                {"qkv": torch.nn.Linear(8, 24), "proj": torch.nn.Linear(8, 8)}
            ),
            "fc1": torch.nn.Linear(8, 32),
            "fc2": torch.nn.Linear(32, 8),
        }
    )
    blocks = torch.nn.ModuleList([block, copy.deepcopy(block), copy.deepcopy(block)])
    model = torch.nn.ModuleDict({"blocks": blocks, "head": torch.nn.Linear(8, 3)})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def build_optimizer(
    model: torch.nn.Module, *, weight_decay: float = 0.1, layer_decay: float = 1.0
) -> Muon:
    groups = parameter_groups(
        model, lr=1e-3, weight_decay=weight_decay, muon_lr=0.02, layer_decay=layer_decay
    )
    return Muon(groups, lr=1e-3, weight_decay=weight_decay)


def draw_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: range
) -> dict[str, torch.Tensor]:
    for seed in seeds:
        draw_gradients(model, seed)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [(16, 16), (16, 48), (48, 16)])
def test_orthogonalize_maps_each_singular_value_by_the_quintic_and_keeps_the_vectors(shape):
    matrices = torch.randn(
        5, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    result = orthogonalize(matrices, dtype=torch.float64)
    for matrix, ours in zip(matrices, result, strict=True):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        expected = u @ torch.diag(quintic(s / s.square().sum().sqrt())) @ vh
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has it from 2.9 on")
def test_equals_torchs_muon_on_matrices_that_are_not_packed():
    torch.manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(32, 8)), torch.nn.Parameter(torch.randn(8, 32))]
    ours = [copy.deepcopy(parameter) for parameter in theirs]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95)
    optimizer = Muon(
        [{"params": ours, "num_matrices": 1}],
        lr=0.02,
        weight_decay=0.1,
        dtype=torch.bfloat16,
    )
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        for parameter, other in zip(theirs, ours, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            other.grad = parameter.grad * 2**seed
        optimizer.grad_scale = torch.tensor(2.0**seed)
        reference.step()
        optimizer.step()
    for parameter, other in zip(theirs, ours, strict=True):
        # five updates of 0.02 · 2 with values near 0.3; bfloat16's products differ in their order
        torch.testing.assert_close(other, parameter, rtol=0, atol=2e-3)


def test_packed_queries_keys_and_values_are_orthogonalised_apart():
    packed, apart = (
        torch.nn.Parameter(torch.randn(24, 8)),
        [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(3)],
    )
    with torch.no_grad():
        for third, parameter in zip(packed.chunk(3), apart, strict=True):
            parameter.copy_(third)
    packed.grad = (
        torch.randn(24, 8) * torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(8)[:, None]
    )
    for third, parameter in zip(packed.grad.chunk(3), apart, strict=True):
        parameter.grad = third.clone()
    Muon([{"params": [packed], "num_matrices": 3}], lr=0.1).step()
    Muon([{"params": apart, "num_matrices": 1}], lr=0.1).step()
    torch.testing.assert_close(
        packed.detach(), torch.cat([parameter.detach() for parameter in apart])
    )


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_moves_as_the_matrix_of_its_flattened_filters(memory_format):
    start, gradient = torch.randn(12, 4, 3, 3), torch.randn(12, 4, 3, 3)
    kernel = torch.nn.Parameter(start.clone(memory_format=memory_format))
    matrix = torch.nn.Parameter(start.flatten(1).clone())
    kernel.grad, matrix.grad = (
        gradient.clone(memory_format=memory_format),
        gradient.flatten(1).clone(),
    )
    optimizer = Muon([{"params": [kernel, matrix], "num_matrices": 1}], lr=0.1, weight_decay=0.1)
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(kernel.detach().flatten(1), matrix.detach())
    assert kernel.detach().sub(start).abs().max() > 0.01


def test_everything_else_equals_torchs_adamw():
    model = build_model()
    reference = copy.deepcopy(model)
    adamw = torch.optim.AdamW(
        parameter_groups(reference, lr=1e-3, weight_decay=0.1), lr=1e-3, fused=True
    )
    ours, theirs = train(model, build_optimizer(model), range(4)), train(reference, adamw, range(4))
    for name in ("head.weight", "head.bias", "blocks.0.fc1.bias"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
