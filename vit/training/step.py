"""One optimisation step: forward, backward, guarded update, average of the weights."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vit.runtime.arguments import check_choice
from vit.runtime.device import Precision, autocast
from vit.runtime.threads import BatchThreads
from vit.training.parallel import is_sharded
from vit.training.stragglers import Timer

Gradients = Sequence[Tensor | None]


class StepResult(NamedTuple):
    """Tensors on the device, so that nothing waits for it. Over all processes."""

    loss: Float[Tensor, ""]  # mean over the global batch, before the update
    correct: Int[Tensor, ""]  # images of the global batch whose largest logit is the label's
    grad_norm: Float[Tensor, ""]  # before clipping
    finite: Bool[Tensor, ""]  # False: loss or gradient was not finite, and nothing was updated


def _split(images: Tensor, targets: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(images.chunk(count), targets.chunk(count), strict=True))


def _add(sums: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Elementwise; None is the gradient of a parameter that is not used."""
    return [
        one if other is None else other if one is None else one + other
        for one, other in zip(sums, gradients, strict=True)
    ]


@dataclass(eq=False)
class TrainStep:
    """Trains `model`, which may be wrapped in DistributedDataParallel or sharded by FSDP2, by one batch a call. A batch
    goes through in `grad_accum_steps` micro-batches of near-equal size whose gradients add up to the whole batch's;
    `threads`, for a model that is not wrapped, divide them among themselves, at least one for each. A non-finite loss
    or gradient changes neither weights nor optimizer nor average; with `halt_on_nonfinite` no later step does either.
    The check needs no answer from the device."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    _: KW_ONLY
    precision: Precision = "bfloat16"
    label_smoothing: float = 0.0
    class_weights: Float[Tensor, " C"] | None = None  # a sample's loss counts as its class's; their mean is 1
    clip_grad: float | None = None
    grad_accum_steps: int = 1
    ema_decay: float | None = None
    average_model: InitVar[nn.Module | None] = None  # by default a copy of the model
    halt_on_nonfinite: bool = False
    compile: InitVar[bool] = False
    threads: BatchThreads | None = None

    def __post_init__(self, average_model: nn.Module | None, compile: bool) -> None:
        check_choice(self.precision, get_args(Precision), name="precision")
        if self.grad_accum_steps < 1:
            raise ValueError(f"grad_accum_steps {self.grad_accum_steps} is not positive; 1 takes the batch at once")
        if self.ema_decay and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay {self.ema_decay} is not between 0 and 1; 0.999 to 0.9999 is usual")
        self.module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        self.step = 0
        self.device = next(self.model.parameters()).device
        self.nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.average: nn.Module | None = None
        if self.ema_decay:
            self.average = (average_model or copy.deepcopy(self.module)).eval().requires_grad_(False)
        # from the third image size on torch would make sizes symbols, which a CUDA graph cannot have
        self._forward = torch.compile(self._compute_loss, dynamic=False) if compile else self._compute_loss
        self.timer = Timer()  # of what waits for no other process
        if is_sharded(self.model):
            self.timer.watch(self.model.get_submodule("blocks"))
        elif isinstance(self.model, DistributedDataParallel):
            self._forward = self.timer.wrap(self._forward)
        # torch's fused optimizers take a rate that is a tensor as float32 on CUDA, as float64 on a CPU
        rate_dtype = torch.float32 if self.device.type == "cuda" else torch.float64
        groups = self.optimizer.param_groups
        self._rates = [torch.zeros((), dtype=rate_dtype, device=self.device) for _ in groups]
        self._average_weight = torch.zeros((), device=self.device)

    @property
    def averaged_model(self) -> nn.Module:
        """The model to evaluate: the weights' average, or the model itself where none is kept."""
        return self.module if self.average is None else self.average

    def __call__(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Update the weights. `targets` are classes [B] or class probabilities [B, C]."""
        self.set_numbers()
        result = self.run(images, targets)
        self.schedule.step()
        self.step += 1
        return result

    def set_numbers(self) -> None:
        """Put what a step takes from the host, learning rates and the average's weight, where `run` reads it. d, the
        average's decay, rises from 0.1 to `ema_decay` as (2 + step) / (11 + step): first weights are soon forgotten."""
        for rate, group in zip(self._rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        self._average_weight.fill_(1 - min(self.ema_decay or 0, (2 + self.step) / (11 + self.step)))

    def run(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """All that a step does on the device. Its numbers and addresses are the next step's, and it reads nothing from
        the device: a CUDA graph of it, replayed after `set_numbers` on batches put in the place of these, trains."""
        # a CUDA graph writes gradients to where they were; a CPU saves adding them to zeros
        self.optimizer.zero_grad(set_to_none=self.device.type == "cpu")
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.threads is not None and len(images) > 1:
            # otherwise all of torch's threads wait for one another in each of the update's hundreds of operations
            with self.threads.take_share():
                return self._update(*self._divide_among_threads(images, targets, self.threads))
        micro_batches = _split(images, targets, self.grad_accum_steps)
        for i, (some_images, some_targets) in enumerate(micro_batches):
            with self._synchronize_gradients(i == len(micro_batches) - 1):
                some_loss, some_correct = self._forward(some_images, some_targets)
                some_loss = some_loss * (len(some_images) / len(images))
                torch.autograd.backward(some_loss)
            loss += some_loss.detach()
            correct += some_correct
        return self._update(loss, correct)

    def _divide_among_threads(self, images: Tensor, targets: Tensor, threads: BatchThreads) -> tuple[Tensor, Tensor]:
        """Loss and correct images of the batch; the gradients, added up in the order of the batch."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]

        def run(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Gradients]:
            loss, correct = self._forward(*part)
            loss = loss * (len(part[0]) / len(images))
            return loss.detach(), correct, torch.autograd.grad(loss, parameters, allow_unused=True)

        loss, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        total: Gradients = [None] * len(parameters)
        parts = _split(images, targets, threads.count * -(-self.grad_accum_steps // threads.count))
        for some_loss, some_correct, gradients in threads.map(run, parts, is_random=True):
            loss, correct, total = loss + some_loss, correct + some_correct, _add(total, gradients)
        for parameter, gradient in zip(parameters, total, strict=True):
            # torch's fused optimizers on a CPU read both in the order of memory; a convolution's gradient has another
            is_alike = gradient is None or gradient.stride() == parameter.stride()
            parameter.grad = gradient if is_alike else torch.empty_like(parameter).copy_(cast(Tensor, gradient))
        return loss, correct

    def _compute_loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self.precision):
            logits = self.model(images)
        if self.class_weights is None:
            loss = F.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)
        else:  # divided by the number of samples, so that micro-batches and processes add up to the batch
            weighting: dict[str, Any] = {"weight": self.class_weights, "label_smoothing": self.label_smoothing}
            loss = F.cross_entropy(logits.float(), targets, **weighting, reduction="none").mean()
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return loss, (logits.detach().argmax(dim=1) == labels).sum()

    @contextmanager
    def _synchronize_gradients(self, synchronize: bool) -> Iterator[None]:
        """Processes exchange gradients once, with the last micro-batch."""
        if is_sharded(self.model):
            cast(Any, self.model).set_requires_gradient_sync(synchronize)
        wait = isinstance(self.model, DistributedDataParallel) and not synchronize
        with cast(DistributedDataParallel, self.model).no_sync() if wait else nullcontext():
            yield

    @torch.no_grad()
    def _update(self, loss: Tensor, correct: Tensor) -> StepResult:
        if isinstance(self.model, DistributedDataParallel) or is_sharded(self.model):
            totals = torch.stack([loss / dist.get_world_size(), correct.float()])
            dist.all_reduce(totals)
            loss, correct = totals[0], totals[1].long()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if is_sharded(self.model):
            norm = cast(Any, norm).full_tensor()
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        if self.halt_on_nonfinite:
            finite &= self.nonfinite_steps == 0
        # torch's fused optimizers divide the gradients by the one and change nothing where the other is 1
        scale = (norm / self.clip_grad).clamp(min=1) if self.clip_grad else None
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimizer.threads = self.threads  # type: ignore[attr-defined]
        with self._rates_on_device():
            self.optimizer.step()
        self.nonfinite_steps += ~finite
        self._update_average(finite)
        return StepResult(loss, correct, norm, finite)

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Between steps they are floats, which the schedule sets and checkpoints hold."""
        floats = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, floats, strict=True):
                group["lr"] = rate

    def _update_average(self, finite: Tensor) -> None:
        """average ← d · average + (1 − d) · weights, where the step was `finite`."""
        if self.average is None:
            return
        averages, values = (
            [value for value in model.state_dict().values() if value.is_floating_point()]
            for model in (self.average, self.module)
        )
        change = torch._foreach_sub(values, averages)
        torch._foreach_mul_(change, self._average_weight * finite)
        torch._foreach_add_(averages, change)

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact continuation needs besides weights, their average, optimizer and schedule."""
        return {"step": self.step, "nonfinite_steps": self.nonfinite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. Runs of version 0.1 saved more, for float16; it is ignored."""
        self.step = state["step"]
        self.nonfinite_steps.copy_(state["nonfinite_steps"])
