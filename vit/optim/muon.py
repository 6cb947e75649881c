"""Muon for hidden matrices and AdamW for everything else, in one optimizer.

Muon (K. Jordan et al., https://kellerjordan.github.io/posts/muon) replaces each matrix's momentum
by the nearest semi-orthogonal matrix, approximated by a quintic Newton–Schulz iteration. Matrices
of one shape are multiplied in one batch, except wide ones on a CPU.

torch.optim.Muon (2.15) takes two-dimensional parameters only, orthogonalises packed queries, keys
and values as one matrix, and has no float32 products and no `found_inf`.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from vit.runtime.threads import BatchThreads

# These are tuned for the steepest slope at zero: five steps bring singular values from 0.001 … 1 to
# about 0.7 … 1.2.
_A = 3.4445
_B = -4.7750
_C = 2.0315
_STEPS = 5
MOMENTUM = 0.95  # Nesterov momentum
_ADAMW_EPS = 1e-8
# On a CPU, wider matrices are faster one by one than in a batch (48 of 384×384 in bfloat16: 108 ms
# against 198).
_BATCHED_WIDTH = 128


def orthogonalize(
    matrices: Float[Tensor, "M R C"], *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "M R C"]:
    """Replace the singular values of each matrix by values near 1, keeping its singular vectors.

    It iterates X ← aX + (bS + cS²)X with S = XXᵀ, transposed if that makes S smaller.

    Args:
        matrices: Stack of M matrices.
        dtype: Data type of the products.
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


class _Stack(NamedTuple):
    """Parameters of some groups whose matrices all have one shape.

    Attributes:
        members: Each parameter with its group.
    """

    rows: int
    columns: int
    members: list[tuple[Tensor, dict[str, Any]]]

    def join(self, tensors: Iterable[Tensor]) -> Float[Tensor, "M R C"]:
        """Stack tensors, one for each parameter, as matrices."""
        return torch.cat([tensor.reshape(-1, self.rows, self.columns) for tensor in tensors])

    def split(self, matrices: Float[Tensor, "M R C"]) -> list[Tensor]:
        """Undo `join`."""
        parameters = [parameter for parameter, _ in self.members]
        counts = [parameter.shape[0] // self.rows for parameter in parameters]
        parts = torch.split(matrices, counts)
        return [part.reshape(p.shape) for part, p in zip(parts, parameters, strict=True)]


class Muon(torch.optim.Optimizer):
    """Muon on the groups whose `num_matrices` is positive, AdamW on the others; one state_dict for
    both.

    A parameter in a Muon group holds `num_matrices` matrices of equal size, one below the other. A
    kernel [O, I, h, w] is the matrix [O, I·h·w], and the update is scaled by
    sqrt(max(1, rows / columns)), both as in the original. So a learning rate near 0.02 fits all
    shapes.

    Args:
        params: Groups of `vit.optim.optimizer.parameter_groups`.
        lr: Learning rate of groups that have none.
        betas: Decay rates of AdamW.
        weight_decay: Weight decay of groups that have none.
        dtype: Data type of Muon's products. The iteration needs no more than bfloat16, which is
            several times faster on some hardware.

    Attributes:
        grad_scale: Divisor of the gradients, as in torch's fused optimizers.
        found_inf: 1 if the step must change nothing. It is read without waiting for the device.
        threads: CPU threads that divide the matrices among themselves.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    threads: BatchThreads | None = None

    # torch excludes these from compilation, and imports its compiler (3 s) at their first call for
    # that. No compiled code of this project calls them.
    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]
    state_dict = torch.optim.Optimizer.state_dict.__wrapped__  # type: ignore[attr-defined]
    load_state_dict = torch.optim.Optimizer.load_state_dict.__wrapped__  # type: ignore[attr-defined]

    def __init__(
        self,
        params: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "num_matrices": 0,
            # With it, load_state_dict puts AdamW's step counts on the device of the parameters.
            "fused": True,
        }
        super().__init__(params, defaults)
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        stacks: dict[tuple[int, int], _Stack] = {}
        for group in self.param_groups:
            if not group["num_matrices"]:
                self._step_adamw(group)
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows = parameter.shape[0] // group["num_matrices"]
                    shape = (rows, parameter[0].numel())
                    stack = stacks.setdefault(shape, _Stack(*shape, []))
                    stack.members.append((parameter, group))
        for stack in stacks.values():
            directions = self._orthogonalize(self._update_momentum(stack))
            directions *= max(1.0, stack.rows / stack.columns) ** 0.5
            self._move(stack, directions)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=_ADAMW_EPS,
            maximize=False,
        )

    def _update_momentum(self, stack: _Stack) -> Float[Tensor, "M R C"]:
        """Update the momentum and return Nesterov's updates.

        The factor 1 − μ is left out, because the iteration normalises them.
        """
        buffers = []
        for parameter, _ in stack.members:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(self.state[parameter]["momentum_buffer"])
        momentum = stack.join(buffers)
        gradient = stack.join(p.grad for p, _ in stack.members if p.grad is not None)
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is not None:
            # The momentum then stays, and the rate of `_move` is 0.
            gradient = torch.where(self.found_inf > 0, momentum, gradient)
        momentum.lerp_(gradient, 1 - MOMENTUM)
        torch._foreach_copy_(buffers, stack.split(momentum))
        return gradient.lerp(momentum, MOMENTUM)

    def _move(self, stack: _Stack, directions: Float[Tensor, "M R C"]) -> None:
        """Set weights ← weights − rate · (directions + decay · weights)."""
        changes = stack.split(directions)
        places: dict[int, list[int]] = {}
        for place, (_, group) in enumerate(stack.members):
            places.setdefault(id(group), []).append(place)
        for members in places.values():
            parameters = [stack.members[place][0] for place in members]
            group = stack.members[members[0]][1]
            # A few operations for all parameters: a loop would start three kernels for each.
            group_changes = torch._foreach_add(
                [changes[place] for place in members], parameters, alpha=group["weight_decay"]
            )
            rate = group["lr"]
            if self.found_inf is not None:
                rate = rate * (self.found_inf == 0)
            torch._foreach_mul_(group_changes, rate)
            torch._foreach_sub_(parameters, group_changes)

    def _orthogonalize(self, stack: Float[Tensor, "M R C"]) -> Float[Tensor, "M R C"]:
        """Call `orthogonalize`, divided among threads."""
        compute = partial(orthogonalize, dtype=self._dtype)
        if self.threads is not None:
            parts = stack.chunk(self.threads.count)
            return torch.cat(list(self.threads.map(compute, parts)))
        return compute(stack)
