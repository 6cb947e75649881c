"""One training step: the parts of a batch are differentiated, their gradients are added in the order
of the batch, and weights and their average are updated once."""

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vit.runtime.device import Precision, autocast, free_cached_memory
from vit.runtime.threads import BatchThreads
from vit.training.losses import StepLoss
from vit.training.step_graphs import StepGraphs

# float16 has no numbers between 0 and 6e-8, where many gradients lie. The loss is multiplied by a
# factor before it is differentiated, which is halved after a gradient that is not finite and doubled
# after a number of steps (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).
_FIRST_SCALE = 2.0**16
_STEPS_TO_DOUBLE = 2000

# a part of a batch: images and targets
_Part = tuple[Tensor, Tensor]
# mean loss times the part's share of the batch, number of right images, gradients of the weights
_Derivative = tuple[Tensor, Tensor, tuple[Tensor | None, ...]]


class StepResult(NamedTuple):
    """The result of a step over all processes: tensors on the device, so that nothing waits for it.

    Attributes:
        loss: Mean over the global batch, before the update.
        correct: Number of right images of the global batch. See `StepLoss`.
        grad_norm: Norm of the gradients before clipping.
        finite: False if the loss or a gradient was not finite and nothing was updated. A step in
            float16 whose gradients may become finite with a smaller loss scale counts as finite; it
            updates nothing either.
    """

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    grad_norm: Float[Tensor, ""]
    finite: Bool[Tensor, ""]


@dataclass(eq=False)
class TrainStep:
    """Trains a model by one batch a call.

    A step whose loss or gradient is not finite changes neither weights nor optimizer nor average.
    The check needs no answer from the device.

    Args:
        model: Model to train; it may be wrapped in DistributedDataParallel.
        optimizer: Optimizer of the model's parameters. It reads `grad_scale` and `found_inf`, as
            torch's fused optimizers and `vit.optim.muon.Muon` do.
        lr_factor: Factor of all learning rates, from the number of a step, counted from 0.
        loss: Loss of a part of a batch.
        precision: Precision of the forward pass; weights and gradients are float32.
        clip_grad: Largest L2 norm of all gradients together.
        grad_accum_steps: Parts that a batch is divided into, at least one for each thread.
        ema_decay: Decay of the average of the weights.
        threads: Threads of a CPU that differentiate the parts, for a model that is not wrapped.
        is_capturable: The model and the loss do the same in each step, so that on a CUDA device
            steps are captured as graphs.
    """

    model: nn.Module
    optimizer: Optimizer
    lr_factor: Callable[[float], float]
    loss: StepLoss
    _: KW_ONLY
    precision: Precision = "bfloat16"
    clip_grad: float | None = None
    grad_accum_steps: int = 1
    ema_decay: float | None = None
    threads: BatchThreads | None = None
    is_capturable: bool = False

    def __post_init__(self) -> None:
        self.module = self.model
        if isinstance(self.model, DistributedDataParallel):
            self.module = self.model.module
        self.average: nn.Module | None = None
        if self.ema_decay:
            self.average = copy.deepcopy(self.module).eval().requires_grad_(False)
            # They are found once, because a walk over the modules takes up to a millisecond.
            self._values = _floating_values(self.module)
            self._average_values = _floating_values(self.average)
        self.device = next(self.model.parameters()).device
        self.num_steps = 0  # done so far

        # Numbers that change from step to step are on the device, where a CUDA graph reads them.
        # torch's fused optimizers take a rate as float32 on a GPU, as float64 on a CPU.
        rate_dtype = torch.float32 if self.device.type in ("cuda", "mps") else torch.float64
        self._full_rates: list[float] = [group["lr"] for group in self.optimizer.param_groups]
        self._rates = [
            torch.zeros((), dtype=rate_dtype, device=self.device) for _ in self._full_rates
        ]
        self._use_own_rates()
        self._average_weight = torch.zeros((), device=self.device)

        self.loss_scale: Tensor | None = None
        if self.precision == "float16":
            self.loss_scale = torch.full((), _FIRST_SCALE, device=self.device)
        # steps in a row with finite gradients since the scale was changed
        self._steps_at_scale = torch.zeros((), dtype=torch.int32, device=self.device)

        self.graphs: StepGraphs | None = None
        if self.is_capturable and self.module is self.model and self.device.type == "cuda":
            self.graphs = StepGraphs(self.run_on_device, self.optimizer)

    def _use_own_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    @property
    def learning_rate(self) -> float:
        """Learning rate that the first parameter group uses in the next step."""
        return self._full_rates[0] * self.lr_factor(self.num_steps)

    @property
    def averaged_model(self) -> nn.Module:
        """The model to evaluate: the average of the weights, or the model itself without one."""
        return self.module if self.average is None else self.average

    def __call__(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Update the weights by the batch of this process. See `StepLoss` for the targets."""
        self.set_schedule_values()
        if self.graphs is None:
            result = self.run_on_device(images, targets)
        else:
            settings = (getattr(self.module, "patch_drop_rate", 0.0), self.grad_accum_steps)
            result = self.graphs(images, targets, settings=settings)
        self.num_steps += 1
        return result

    def set_schedule_values(self) -> None:
        """Copy learning rates and the average's weight, which change from step to step, to the
        device. The average's decay rises from 0.1 to `ema_decay` as (2 + step) / (11 + step), so
        that the first weights are soon forgotten."""
        lr_factor = self.lr_factor(self.num_steps)
        for rate, full_rate in zip(self._rates, self._full_rates, strict=True):
            rate.fill_(full_rate * lr_factor)
        rising_decay = (2 + self.num_steps) / (11 + self.num_steps)
        self._average_weight.fill_(1 - min(self.ema_decay or 0, rising_decay))

    def run_on_device(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Do all that a step does on the device. It reads nothing from the device and uses the same
        memory each time, so that a CUDA graph of it can be replayed on other batches."""
        self.optimizer.zero_grad()
        self._trainable = [weight for weight in self.module.parameters() if weight.requires_grad]
        # On a CPU the update runs on the threads that divide the batch; otherwise torch's threads
        # would wait for one another in hundreds of operations.
        divides = self.threads is not None and len(images) > 1
        with self.threads.limit_threads() if divides and self.threads else nullcontext():
            if isinstance(self.model, DistributedDataParallel):
                loss, correct = self._differentiate_in_processes(self.model, images, targets)
            else:
                loss, correct = self._differentiate_in_memory(images, targets)
            return self._update(loss, correct)

    def _differentiate_in_memory(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Call `differentiate`. If it doesn't fit into a GPU's memory, repeat it with the random
        numbers that follow torch's last seed, from now on in parts of half the size."""
        while True:
            try:
                return self.differentiate(images, targets)
            except torch.OutOfMemoryError:
                is_gpu = self.device.type == "cuda"
                is_captured = is_gpu and torch.cuda.is_current_stream_capturing()
                if is_captured or self.grad_accum_steps >= len(images):
                    raise
            # Not above, where the error still holds the tensors of the failed pass.
            self.grad_accum_steps = min(2 * self.grad_accum_steps, len(images))
            free_cached_memory(self.device)
            torch.manual_seed(torch.initial_seed())
            warnings.warn(
                f"{len(images)} images did not fit the GPU's memory; training goes on in"
                f" {self.grad_accum_steps} micro-batches a step (train.grad_accum_steps)",
                stacklevel=2,
            )

    def differentiate(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of right images of a batch. Its gradients, times the loss
        scale, are in `.grad`."""
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        sums: list[Tensor | None] = [None] * len(self._trainable)
        # In the order of the batch, so that the sum doesn't depend on which thread is first.
        for part_loss, part_correct, gradients in self._map_parts(images, targets):
            loss = loss + part_loss
            correct = correct + part_correct
            for place, gradient in enumerate(gradients):
                total = sums[place]
                if total is None:
                    sums[place] = gradient
                elif gradient is not None:  # None: the loss doesn't depend on this weight
                    sums[place] = total + gradient

        for weight, gradient in zip(self._trainable, sums, strict=True):
            # torch's fused optimizers read weight and gradient in the order of memory, and a
            # convolution's gradient has another order.
            if gradient is not None and gradient.stride() != weight.stride():
                gradient = torch.empty_like(weight).copy_(gradient)
            weight.grad = gradient
        return loss, correct

    def _map_parts(self, images: Tensor, targets: Tensor) -> Iterable[_Derivative]:
        """Return the derivatives of the parts of a batch, in order."""

        def differentiate(part: _Part) -> _Derivative:
            loss, correct = self._compute_loss(part, len(images))
            # Not loss.backward(): threads would add to one .grad in an order that is not fixed.
            gradients = torch.autograd.grad(self._scale(loss), self._trainable, allow_unused=True)
            return loss.detach(), correct, gradients

        if self.threads is None or len(images) == 1:
            return map(differentiate, _divide(images, targets, self.grad_accum_steps))
        # each thread has equally many parts
        rounds = -(-self.grad_accum_steps // self.threads.count)
        parts = _divide(images, targets, self.threads.count * rounds)
        return self.threads.map(differentiate, parts, is_random=True)

    def _differentiate_in_processes(
        self, model: DistributedDataParallel, images: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Call `backward` on each part. The processes exchange gradients with the last one."""
        parts = _divide(images, targets, self.grad_accum_steps)
        # mean loss over the processes, number of right images
        totals = torch.zeros(2, device=self.device)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else model.no_sync():
                loss, correct = self._compute_loss(part, len(images))
                self._scale(loss).backward()  # type: ignore[no-untyped-call]
            totals += torch.stack([loss.detach() / dist.get_world_size(), correct.float()])
        dist.all_reduce(totals)
        return totals[0], totals[1].long()

    def _compute_loss(self, part: _Part, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return the loss of a part, times its share of the batch, and its number of right images."""
        images, targets = part
        with autocast(self.device, self.precision):
            logits = self.model(images)
        loss, correct = self.loss(logits, targets)
        return loss * (len(images) / batch_size), correct

    def _scale(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale is None else loss * self.loss_scale

    @torch.no_grad()
    def _update(self, loss: Tensor, correct: Tensor) -> StepResult:
        """Update the weights, unless loss or gradients are not finite. The gradients are those of
        `loss` times the loss scale."""
        gradients = [weight.grad for weight in self._trainable if weight.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        if self.loss_scale is not None:
            grad_norm = grad_norm / self.loss_scale
        updates = torch.isfinite(grad_norm) & torch.isfinite(loss)
        found_inf = (~updates).float()
        grad_scale = None
        if self.clip_grad:
            grad_scale = (grad_norm / self.clip_grad).clamp(min=1)
        finite = updates
        if self.loss_scale is not None:
            finite = updates | (torch.isfinite(loss) & (self.loss_scale > 1))
            grad_scale = self.loss_scale * (1.0 if grad_scale is None else grad_scale)

        # torch's fused optimizers divide the gradients by grad_scale, and change nothing if
        # found_inf is 1.
        self.optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self.optimizer.threads = self.threads  # type: ignore[attr-defined]  # Muon divides matrices
        self.optimizer.step()
        if self.loss_scale is not None:
            # the kernel of torch.amp.GradScaler
            torch._amp_update_scale_(
                self.loss_scale, self._steps_at_scale, found_inf, 2.0, 0.5, _STEPS_TO_DOUBLE
            )
        if self.average is not None:
            # average ← d · average + (1 − d) · weights, in a few operations for all tensors
            # together; a loop would start three kernels for each
            change = torch._foreach_sub(self._values, self._average_values)
            torch._foreach_mul_(change, self._average_weight * updates)
            torch._foreach_add_(self._average_values, change)
        return StepResult(loss, correct, grad_norm, finite)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-exact continuation needs."""
        loss_scale = None
        if self.loss_scale is not None:
            loss_scale = {"factor": self.loss_scale, "steps": self._steps_at_scale}
        return {
            "model": self.module.state_dict(),
            "average": self.averaged_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "grad_accum_steps": self.grad_accum_steps,
            "loss_scale": loss_scale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, on this step's device."""
        self.module.load_state_dict(state["model"])
        self.averaged_model.load_state_dict(state["average"])
        # The settings of the groups are the run's own.
        own = self.optimizer.state_dict()
        self.optimizer.load_state_dict({**own, "state": state["optimizer"]["state"]})
        self._use_own_rates()
        if self.graphs is not None:
            self.graphs.forget()
        self.num_steps = state["num_steps"]
        self.grad_accum_steps = state["grad_accum_steps"]
        # A run that goes on in another precision begins with a scale of its own.
        if self.loss_scale is not None and state["loss_scale"] is not None:
            self.loss_scale.copy_(state["loss_scale"]["factor"])
            self._steps_at_scale.copy_(state["loss_scale"]["steps"])


def _divide(images: Tensor, targets: Tensor, count: int) -> list[_Part]:
    """Divide a batch into parts of near-equal size."""
    return list(zip(images.chunk(count), targets.chunk(count), strict=True))


def _floating_values(model: nn.Module) -> list[Tensor]:
    """Return weights and buffers, without counters."""
    return [value for value in model.state_dict().values() if value.is_floating_point()]
