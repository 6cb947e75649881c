"""Muon for hidden matrices and AdamW for everything else, in one optimizer.

Muon (K. Jordan et al., https://kellerjordan.github.io/posts/muon) replaces each matrix's momentum
by the nearest semi-orthogonal matrix, approximated by a quintic Newton–Schulz iteration. Matrices
of one shape are multiplied in one batch, except wide ones on a CPU.

torch.optim.Muon (2.15) takes two-dimensional parameters only, orthogonalises packed queries, keys
and values as one matrix, and has no float32 products and no `found_inf`.
"""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import AdamW, Optimizer

from vit.runtime.threads import BatchThreads

# These are tuned for the steepest slope at zero: five steps bring singular values from 0.001 … 1 to
# about 0.7 … 1.2.
_A = 3.4445
_B = -4.7750
_C = 2.0315
_STEPS = 5
MOMENTUM = 0.95  # Nesterov momentum
_Member = tuple[Tensor, Tensor]  # a parameter, and the learning rate of each of its matrices
# On a CPU, wider matrices are faster one by one than in a batch (48 of 384×384 in bfloat16: 108 ms
# against 198).
_BATCHED_WIDTH = 128


def orthogonalize(
    matrices: Float[Tensor, "M R C"], *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "M R C"]:
    """Replace the singular values of each matrix by values near 1, keeping its singular vectors.

    It iterates X ← aX + (bS + cS²)X with S = XXᵀ, transposed if that makes S smaller. `dtype` is
    the data type of the products.
    """
    rows, columns = matrices.shape[-2:]
    is_tall = rows > columns
    work = matrices.mT if is_tall else matrices
    norms = work.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    work = (work / norms).to(dtype).contiguous()
    if work.is_cpu and min(rows, columns) > _BATCHED_WIDTH:
        work = torch.stack([_iterate(matrix) for matrix in work])
    else:
        work = _iterate(work)
    if is_tall:
        work = work.mT
    return work.to(matrices.dtype)


def _iterate(work: Tensor) -> Tensor:
    """Run Newton–Schulz on a wide matrix [R, C], or on a stack [M, R, C]."""
    multiply_add = torch.addmm if work.ndim == 2 else torch.baddbmm
    for _ in range(_STEPS):
        gram = work @ work.mT
        polynomial = multiply_add(gram, gram, gram, beta=_B, alpha=_C)
        work = multiply_add(work, polynomial, work, beta=_A)
    return work


class Muon(AdamW):
    """Muon on the groups whose `num_matrices` is positive, torch's AdamW on the others; one
    state_dict for both.

    A parameter in a Muon group holds `num_matrices` matrices of equal size, one below the other. A
    kernel [O, I, h, w] is the matrix [O, I·h·w], and the update is scaled by
    sqrt(max(1, rows / columns)), both as in the original. So a learning rate near 0.02 fits all
    shapes.

    Args:
        params: Groups of `vit.optim.optimizer.parameter_groups`.
        betas: Decay rates of AdamW.
        dtype: Data type of Muon's products. The iteration needs no more than bfloat16.

    Attributes:
        grad_scale: Divisor of the gradients, as in torch's fused optimizers.
        found_inf: 1 if the step must change nothing. It is read without waiting for the device.
        threads: CPU threads that divide the matrices among themselves.
    """

    # torch excludes these from compilation, and imports its compiler (3 s) at their first call for
    # that. No compiled code of this project calls them.
    add_param_group = Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    zero_grad = Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]
    state_dict = Optimizer.state_dict.__wrapped__  # type: ignore[attr-defined]
    load_state_dict = Optimizer.load_state_dict.__wrapped__  # type: ignore[attr-defined]
    # AdamW's own looks for a count of steps, which Muon's parameters don't have.
    __setstate__ = Optimizer.__setstate__

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay=weight_decay, fused=True)
        self._dtype = dtype
        device = self.param_groups[0]["params"][0].device
        self.grad_scale = torch.ones((), device=device)
        self.found_inf = torch.zeros((), device=device)
        self.threads: BatchThreads | None = None

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        """Collect the parameters that AdamW updates."""
        if group["num_matrices"]:
            return False
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call, no-any-return]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        # Its wrapper would import the compiler, too.
        inspect.unwrap(AdamW.step)(self)
        # rows, columns and weight decay → parameters whose matrices have these
        stacks: dict[tuple[int, int, float], list[_Member]] = {}
        for group in self.param_groups:
            count = group["num_matrices"]
            rates = torch.as_tensor(group["lr"], device=self.found_inf.device).float()
            for parameter in group["params"]:
                if count and parameter.grad is not None:
                    kind = (len(parameter) // count, parameter[0].numel(), group["weight_decay"])
                    stacks.setdefault(kind, []).append((parameter, rates.expand(count, 1, 1)))
        for (rows, columns, weight_decay), members in stacks.items():
            self._step_muon(members, rows, columns, weight_decay)

    def _step_muon(
        self, members: list[_Member], rows: int, columns: int, weight_decay: float
    ) -> None:
        """Update the momentum, and set weights ← weights − rate · (direction + decay · weights).

        The factor 1 − μ of the momentum is left out, because the iteration normalises it.
        """
        parameters = [parameter for parameter, _ in members]

        def join(tensors: Iterable[Any]) -> Float[Tensor, "M R C"]:
            return torch.cat([tensor.reshape(-1, rows, columns) for tensor in tensors])

        def split(matrices: Float[Tensor, "M R C"]) -> list[Tensor]:
            parts = torch.split(matrices, [len(parameter) // rows for parameter in parameters])
            return [part.reshape(p.shape) for part, p in zip(parts, parameters, strict=True)]

        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        momentum = join(buffers)
        gradient = join(parameter.grad for parameter in parameters) / self.grad_scale
        # With a gradient that is not finite the momentum stays, and the rates below are 0.
        gradient = torch.where(self.found_inf > 0, momentum, gradient)
        momentum.lerp_(gradient, 1 - MOMENTUM)
        torch._foreach_copy_(buffers, split(momentum))

        compute = partial(orthogonalize, dtype=self._dtype)
        directions = gradient.lerp(momentum, MOMENTUM)
        if self.threads is None:
            directions = compute(directions)
        else:
            parts = directions.chunk(self.threads.count)
            directions = torch.cat(list(self.threads.map(compute, parts)))
        directions *= max(1.0, rows / columns) ** 0.5
        directions.add_(join(parameters), alpha=weight_decay)
        directions *= torch.cat([rates for _, rates in members]) * (self.found_inf == 0)
        torch._foreach_sub_(parameters, split(directions))
