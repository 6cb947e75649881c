"""The pretend device takes a host tensor without dimensions where CUDA takes one, and nowhere
else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.runtime.conftest import Counter


def update_by_adamw(step: Tensor, found_inf: Tensor) -> None:
    values = [torch.ones(3, device="npu") for _ in range(4)]
    torch._fused_adamw_(
        *([value] for value in values),
        [],
        [step],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )


MISUSES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "fused, in a list": lambda host, there: update_by_adamw(host, there.sum()),
    "fused, by name": lambda host, there: update_by_adamw(there.sum(), host),
    "foreach, in a list": lambda host, there: torch._foreach_add_([there, host], 1),
    "foreach, for all": lambda host, there: torch._foreach_mul_([there], host),
    "stack": lambda host, there: torch.stack([there.sum(), host]),
    "in place": lambda host, there: host.add_(there.sum()),
    "out": lambda host, there: torch.add(there.sum(), 1, out=host),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_host_scalar_is_refused_where_cuda_refuses_it(npu: Counter, name: str) -> None:
    host = torch.zeros(())
    there = torch.ones(3, device="npu")
    with pytest.raises(RuntimeError, match="host scalars where CUDA takes none"):
        MISUSES[name](host, there)


def test_a_host_scalar_is_a_number_in_arithmetic(npu: Counter) -> None:
    there = torch.ones(3, device="npu")
    assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert there.add_(torch.tensor(2.0)).tolist() == [3, 3, 3]
    update_by_adamw(torch.zeros((), device="npu"), torch.zeros((), device="npu"))


def test_a_backward_pass_that_is_not_deterministic_is_refused(npu: Counter) -> None:
    gradient = torch.ones(1, 1, 2, 2, device="npu")
    with pytest.raises(RuntimeError, match="no deterministic implementation"):
        torch.ops.aten._upsample_bicubic2d_aa_backward(gradient, [2, 2], [1, 1, 4, 4], False)
