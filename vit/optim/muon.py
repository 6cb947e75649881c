"""Muon for hidden matrices and AdamW for everything else, in one optimizer.

Muon (K. Jordan et al., https://kellerjordan.github.io/posts/muon) replaces each matrix's momentum by the nearest
semi-orthogonal matrix, approximated by a quintic Newton–Schulz iteration. Matrices of one shape go through one chain of
batched products, on a CPU the wider ones each through its own; several processes divide the matrices among themselves.

torch.optim.Muon (2.15) takes two-dimensional parameters only, orthogonalises packed queries, keys and values as one
matrix, has no float32 products and no `found_inf`, and computes every matrix in every process.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.optim.adamw import adamw

from vit.runtime.processes import current_process
from vit.runtime.threads import BatchThreads

# tuned for the steepest slope at zero: five steps bring singular values of 0.001 … 1 into about 0.7 … 1.2
_A, _B, _C = 3.4445, -4.7750, 2.0315
# On a CPU one product after the other is faster for wider matrices (48 of 384×384 in bfloat16: 108 ms against 198).
_BATCHED_WIDTH = 128


def orthogonalize(
    matrices: Float[Tensor, "M R C"], *, steps: int = 5, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "M R C"]:
    """Replace the singular values of each matrix by values near 1, keeping its singular vectors.
    Iterates X ← aX + (bS + cS²)X with S = XXᵀ, on the wide side so that S is the smaller of the two products."""
    rows, columns = matrices.shape[-2:]
    work = matrices.mT if rows > columns else matrices
    work = (work / work.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype).contiguous()
    if work.is_cpu and min(rows, columns) > _BATCHED_WIDTH:
        work = torch.stack([_iterate(matrix, steps=steps) for matrix in work])
    else:
        work = _iterate(work, steps=steps)
    return (work.mT if rows > columns else work).to(matrices.dtype)


def _iterate(work: Tensor, *, steps: int) -> Tensor:
    """Newton–Schulz on a wide matrix [R, C], or on a stack of them [M, R, C]."""
    multiply_add = torch.addmm if work.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = work @ work.mT
        polynomial = multiply_add(gram, gram, gram, beta=_B, alpha=_C)
        work = multiply_add(work, polynomial, work, beta=_A)
    return work


class Muon(torch.optim.Optimizer):
    """Muon on the groups whose `num_matrices` is positive, AdamW on the others; one state_dict for both.

    A Muon group's parameters are `num_matrices` matrices of equal size, one below the other; a convolution's kernel [O,
    I, h, w] is the matrix [O, I·h·w], as in the original. The update is scaled by sqrt(max(1, rows / columns)) as
    there, so a learning rate near 0.02 fits all shapes. `dtype` is the products': the iteration needs no more than
    bfloat16, which is several times faster where the hardware has it, but then results depend on the order of a sum,
    and so on the number of processes. `grad_scale` and `found_inf` are read as torch's fused optimizers read them:
    gradients are divided by the one, and nothing changes where the other is 1, without waiting for the device.
    """

    _step_supports_amp_scaling = True
    threads: BatchThreads | None = None  # that divide the matrices among themselves
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    # torch keeps these out of what is compiled, and imports its compiler at their first call for that, which takes 3 s;
    # what this project compiles doesn't call them
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
        momentum: float = 0.95,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
        super().__init__(params, defaults | {"num_matrices": 0})
        self._dtype = dtype
        for group in self.param_groups:
            for parameter in group["params"]:
                count, shape = group["num_matrices"], tuple(parameter.shape)
                if count and (len(shape) < 2 or shape[0] % count):
                    raise ValueError(f"Muon takes parameters that split into {count} matrices; got {shape}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "no closure: the loss is computed before the step"
        for group in self.param_groups:
            if not group["num_matrices"]:
                self._step_adamw(group)
        self._step_muon()

    def _step_adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        gradients = [parameter.grad for parameter in parameters]
        averages, squares, steps = (
            [self.state[parameter][key] for parameter in parameters] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        settings = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        settings |= {"beta1": group["betas"][0], "beta2": group["betas"][1], "amsgrad": False, "maximize": False}
        settings |= {"fused": True, "grad_scale": self.grad_scale, "found_inf": self.found_inf}
        adamw(parameters, gradients, averages, squares, [], steps, **settings)

    def _step_muon(self) -> None:
        stacks: dict[tuple[int, int, float], list[tuple[dict[str, Any], list[Tensor]]]] = defaultdict(list)
        for group in self.param_groups:
            parameters: dict[tuple[int, int, float], list[Tensor]] = defaultdict(list)
            for parameter in group["params"] if group["num_matrices"] else ():
                if parameter.grad is not None:
                    shape = (parameter.shape[0] // group["num_matrices"], parameter[0].numel())
                    parameters[*shape, group["momentum"]].append(parameter)
            for key, members in parameters.items():
                stacks[key].append((group, members))
        updates = [
            self._momentum([parameter for _, members in entries for parameter in members], (rows, columns), momentum)
            for (rows, columns, momentum), entries in stacks.items()
        ]
        of_stacks = zip(stacks.items(), self._orthogonalize_all(updates), strict=True)
        for ((rows, columns, _), entries), directions in of_stacks:
            directions *= max(1.0, rows / columns) ** 0.5
            each = iter(torch.split(directions, [p.shape[0] // rows for _, members in entries for p in members]))
            for group, members in entries:
                changes = [next(each).reshape(parameter.shape) for parameter in members]
                changes = list(torch._foreach_add(changes, members, alpha=group["weight_decay"]))
                rate = group["lr"] if self.found_inf is None else group["lr"] * (self.found_inf == 0)
                torch._foreach_mul_(changes, rate)
                torch._foreach_sub_(members, changes)

    def _momentum(self, parameters: list[Tensor], shape: tuple[int, int], momentum: float) -> Float[Tensor, "M R C"]:
        """Nesterov's updates, up to the factor 1 − μ, which the iteration's normalisation removes."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        gradient, buffer = (torch.cat([part.reshape(-1, *shape) for part in of]) for of in (gradients, buffers))
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is None:
            ahead = buffer.lerp(gradient, 1 - momentum)
        else:
            gradient = torch.where(self.found_inf > 0, 0.0, gradient)
            ahead = torch.where(self.found_inf > 0, buffer, buffer.lerp(gradient, 1 - momentum))
        each = torch.split(ahead, [parameter.shape[0] // shape[0] for parameter in parameters])
        torch._foreach_copy_(buffers, [part.reshape(of.shape) for part, of in zip(each, buffers, strict=True)])
        return gradient.lerp(ahead, momentum)

    def _orthogonalize_all(self, updates: Sequence[Float[Tensor, "M R C"]]) -> list[Float[Tensor, "M R C"]]:
        """`orthogonalize` of each stack, divided among processes or threads."""
        if current_process().world_size > 1:
            return [self._orthogonalize_divided(stack) for stack in updates]
        if self.threads is None:
            return [orthogonalize(stack, dtype=self._dtype) for stack in updates]
        parts = [stack.chunk(self.threads.count) for stack in updates]
        every = list(chain.from_iterable(parts))
        # those that take longest come first, so that no thread waits long for the last
        order = sorted(range(len(every)), key=lambda number: every[number].numel(), reverse=True)
        done = self.threads.map(partial(orthogonalize, dtype=self._dtype), [every[number] for number in order])
        directions = iter([found for _, found in sorted(zip(order, done, strict=True), key=itemgetter(0))])
        return [torch.cat(list(islice(directions, len(of_stack)))) for of_stack in parts]

    def _orthogonalize_divided(self, updates: Float[Tensor, "M R C"]) -> Float[Tensor, "M R C"]:
        process = current_process()
        count = -(-len(updates) // process.world_size)  # every rank takes as many; the last ones repeat a matrix
        numbers = torch.arange(process.rank * count, (process.rank + 1) * count, device=updates.device)
        gathered = updates.new_empty(process.world_size * count, *updates.shape[1:])
        directions = orthogonalize(updates[numbers.clamp(max=len(updates) - 1)], dtype=self._dtype)
        dist.all_gather_into_tensor(gathered, directions.contiguous())
        return gathered[: len(updates)]
