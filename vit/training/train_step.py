"""One training step: forward pass, backward pass, update of the weights and of their average."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vit.model.checkpoint import StepState
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import Precision, autocast, free_cached_memory
from vit.runtime.threads import BatchThreads
from vit.training.compiled_function import CompiledFunction
from vit.training.loss_scale import LossScale
from vit.training.step_graphs import StepGraphs
from vit.training.threaded_step import forward_backward_on_threads


class StepResult(NamedTuple):
    """Tensors on the device, so that nothing waits for it. Over all processes."""

    loss: Float[Tensor, ""]  # mean over the global batch, before the update
    correct: Int[Tensor, ""]  # images of the global batch whose largest logit is the label's
    grad_norm: Float[Tensor, ""]  # before clipping
    # False: loss or gradient was not finite, and nothing was updated. Gradients in float16 that a
    # smaller loss scale may make finite don't count: such a step is finite, and updates nothing
    finite: Bool[Tensor, ""]


@dataclass(eq=False)
class TrainStep:
    """Trains a model by one batch a call.

    A step with a loss or gradient that is not finite changes neither weights nor optimizer nor
    average. The check needs no answer from the device.

    Args:
        model: to train; it may be wrapped in DistributedDataParallel.
        optimizer: over the model's parameters, one that reads `grad_scale` and `found_inf`, as
            torch's fused ones and `vit.optim.muon.Muon` do.
        lr_factor: of all learning rates, from the number of a step, counted from 0.
        precision: of the forward pass; weights and gradients are float32. In float16 the loss is
            scaled, see `vit.training.loss_scale`.
        label_smoothing: from 0 to 1, as `torch.nn.functional.cross_entropy` takes it.
        class_weights: what a sample's loss is multiplied by, by its class; their mean over the
            training images is 1. None weighs all alike.
        clip_grad: the largest L2 norm of all gradients together; None doesn't clip.
        grad_accum_steps: micro-batches of near-equal size that a batch goes through in; their
            gradients add up to the whole batch's.
        ema_decay: of the average of the weights that is kept beside them; None keeps none.
        halt_on_nonfinite: after a step that is not finite, no later one changes anything either.
        compile: the forward pass and the loss, and with them the backward pass.
        threads: of a CPU that divide the batch among themselves, for a model that is not wrapped.
            Each takes at least one micro-batch.
    """

    model: nn.Module
    optimizer: Optimizer
    lr_factor: Callable[[float], float]
    _: KW_ONLY
    precision: Precision = "bfloat16"
    label_smoothing: float = 0.0
    class_weights: Float[Tensor, " C"] | None = None
    clip_grad: float | None = None
    grad_accum_steps: int = 1
    ema_decay: float | None = None
    halt_on_nonfinite: bool = False
    compile: bool = False
    threads: BatchThreads | None = None

    def __post_init__(self) -> None:
        self.module = self.model
        if isinstance(self.model, DistributedDataParallel):
            self.module = self.model.module
        self.average: nn.Module | None = None
        if self.ema_decay:
            self.average = copy.deepcopy(self.module).eval().requires_grad_(False)
            # found once: a walk over the modules takes the host up to a millisecond
            self._values = _floating_values(self.module)
            self._average_values = _floating_values(self.average)

        self._forward = self._compute_loss
        if self.compile:
            self._forward = CompiledFunction(self._compute_loss)

        self.num_steps = 0  # done so far
        self.device = next(self.model.parameters()).device
        self.nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self.device)

        # numbers that change from step to step are on the device, where a CUDA graph reads them;
        # torch's fused optimizers take a rate as float32 on CUDA, as float64 on a CPU
        rate_dtype = torch.float32 if self.device.type == "cuda" else torch.float64
        self._full_rates: list[float] = []
        self._rates: list[Tensor] = []
        for group in self.optimizer.param_groups:
            self._full_rates.append(group["lr"])
            group["lr"] = torch.zeros((), dtype=rate_dtype, device=self.device)
            self._rates.append(group["lr"])
        self._average_weight = torch.zeros((), device=self.device)

        self.loss_scale: LossScale | None = None
        if self.precision == "float16":
            self.loss_scale = LossScale(self.device)

        self.graphs: StepGraphs | None = None
        # other models may do something else in each step, by numbers of the host; torch's gradient
        # checkpointing reads the state of the device's random numbers
        is_capturable = isinstance(self.model, VisionTransformer)
        if is_capturable and not self.model.grad_checkpointing and self.device.type == "cuda":
            self.graphs = StepGraphs(self.run_on_device, self.optimizer, self.device)

    @property
    def learning_rate(self) -> float:
        """Of the first group's next step."""
        return self._full_rates[0] * self.lr_factor(self.num_steps)

    @property
    def averaged_model(self) -> nn.Module:
        """The model to evaluate: the weights' average, or the model itself where none is kept."""
        return self.module if self.average is None else self.average

    def __call__(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Update the weights.

        Args:
            images: a batch of this process.
            targets: classes [B] or class probabilities [B, C].
        """
        self.set_schedule_values()
        if self.graphs is None:
            result = self.run_on_device(images, targets)
        else:
            settings = (getattr(self.module, "patch_drop_rate", 0.0), self.grad_accum_steps)
            result = self.graphs(images, targets, settings=settings)
        self.num_steps += 1
        return result

    def run_on_device(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """All that a step does on the device, with the values of `set_schedule_values`. It reads
        nothing from the device and uses the same memory each time, so a CUDA graph of it can be
        replayed on other batches put in the place of this one."""
        # made anew instead of added to zeros; those that are made while a CUDA graph is captured
        # lie in the graph's own memory, where each replay writes them
        self.optimizer.zero_grad()

        if self.threads is None or len(images) == 1:
            loss, correct = self._forward_backward_in_memory(images, targets)
            return self.update(loss, correct)

        # on a CPU each thread differentiates a part of the batch; the update runs on the same
        # threads, as otherwise all of torch's wait for one another in each of its hundreds of
        # operations
        with self.threads.limit_threads():
            loss, correct = forward_backward_on_threads(
                self._forward,
                list(self.model.parameters()),
                images,
                targets,
                threads=self.threads,
                num_micro_batches=self.grad_accum_steps,
                loss_scale=self.loss_scale,
            )
            return self.update(loss, correct)

    def _forward_backward_in_memory(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """`forward_backward`; on a GPU whose memory it doesn't fit, from now on in micro-batches of
        half as many images. It is repeated with the random numbers that follow torch's last seed.
        """
        start_count = self.grad_accum_steps
        while True:
            try:
                loss, correct = self.forward_backward(images, targets)
                break
            except torch.OutOfMemoryError:
                # other processes may be waiting for this one's gradients, or a graph is captured
                can_repeat = not isinstance(self.model, DistributedDataParallel)
                if self.device.type == "cuda":
                    can_repeat &= not torch.cuda.is_current_stream_capturing()
                if not can_repeat or self.grad_accum_steps >= len(images):
                    raise
            # not above, where the error still keeps the tensors of the failed pass
            self.grad_accum_steps = min(2 * self.grad_accum_steps, len(images))
            self.optimizer.zero_grad()
            free_cached_memory(self.device)
            torch.manual_seed(torch.initial_seed())

        if self.grad_accum_steps != start_count:
            warnings.warn(
                f"{len(images)} images did not fit the GPU's memory; training goes on in"
                f" {self.grad_accum_steps} micro-batches a step (train.grad_accum_steps)",
                stacklevel=2,
            )
        return loss, correct

    def forward_backward(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and number of correct images of a batch; its gradients, times the loss scale, are in
        `.grad`."""
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        micro_images = images.chunk(self.grad_accum_steps)
        micro_targets = targets.chunk(self.grad_accum_steps)
        for number, micro_batch in enumerate(zip(micro_images, micro_targets, strict=True), 1):
            # processes exchange gradients once, with the last micro-batch
            gradient_sync: AbstractContextManager[None] = nullcontext()
            if isinstance(self.model, DistributedDataParallel) and number < len(micro_images):
                gradient_sync = self.model.no_sync()
            with gradient_sync:
                micro_loss, micro_correct = self._forward(*micro_batch)
                micro_loss = micro_loss * (len(micro_batch[0]) / len(images))
                scaled_loss: Tensor = micro_loss
                if self.loss_scale is not None:
                    scaled_loss = self.loss_scale(micro_loss)
                scaled_loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            loss += micro_loss.detach()
            correct += micro_correct
        return loss, correct

    @torch.no_grad()
    def update(self, loss: Tensor, correct: Tensor) -> StepResult:
        """Move the weights along the gradients, unless loss or gradients are not finite. The
        gradients are the loss scale's times those of `loss`."""
        if isinstance(self.model, DistributedDataParallel):
            totals = torch.stack([loss / dist.get_world_size(), correct.float()])
            dist.all_reduce(totals)
            loss = totals[0]
            correct = totals[1].long()

        gradients = [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        if self.loss_scale is not None:
            grad_norm = grad_norm / self.loss_scale.factor

        updates = torch.isfinite(grad_norm) & torch.isfinite(loss)
        finite = updates
        if self.loss_scale is not None:
            finite = updates | (torch.isfinite(loss) & self.loss_scale.can_fall())
        if self.halt_on_nonfinite:
            has_halted = self.nonfinite_steps > 0
            updates = updates & ~has_halted
            finite = finite & ~has_halted
        self.nonfinite_steps += ~finite

        # torch's fused optimizers divide the gradients by grad_scale and change nothing where
        # found_inf is 1
        grad_scale = None
        if self.clip_grad:
            grad_scale = (grad_norm / self.clip_grad).clamp(min=1)
        if self.loss_scale is not None:
            clipping = 1.0 if grad_scale is None else grad_scale
            grad_scale = self.loss_scale.factor * clipping
            self.loss_scale.update(updates)
        self.optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~updates).float()  # type: ignore[attr-defined]
        self.optimizer.threads = self.threads  # type: ignore[attr-defined]  # Muon divides matrices
        self.optimizer.step()
        self._update_average(updates)
        return StepResult(loss, correct, grad_norm, finite)

    def set_schedule_values(self) -> None:
        """Put what a step takes from the host, learning rates and the average's weight, on the
        device. The average's decay d rises from 0.1 to `ema_decay` as (2 + step) / (11 + step):
        the first weights are soon forgotten."""
        lr_factor = self.lr_factor(self.num_steps)
        for rate, full_rate in zip(self._rates, self._full_rates, strict=True):
            rate.fill_(full_rate * lr_factor)
        rising_decay = (2 + self.num_steps) / (11 + self.num_steps)
        self._average_weight.fill_(1 - min(self.ema_decay or 0, rising_decay))

    def state_dict(self) -> StepState:
        """Return all that a bit-exact continuation needs."""
        return {
            "model": self.module.state_dict(),
            "average": self.averaged_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "nonfinite_steps": self.nonfinite_steps,
            "grad_accum_steps": self.grad_accum_steps,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: StepState) -> None:
        """Continue where `state_dict` was taken, on this step's device.

        Raises:
            RuntimeError: the state is damaged or of another model.
        """
        self.module.load_state_dict(state["model"])
        self.averaged_model.load_state_dict(state["average"])
        # torch takes anything, and fails at the next step
        for values in state["optimizer"]["state"].values():
            if not all(value is None or isinstance(value, Tensor) for value in values.values()):
                raise RuntimeError("the optimizer's state holds more than tensors")
        self.optimizer.load_state_dict(state["optimizer"])
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if self.graphs is not None:
            self.graphs.forget()
        self.num_steps = state["num_steps"]
        self.grad_accum_steps = state["grad_accum_steps"]
        self.nonfinite_steps.copy_(state["nonfinite_steps"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"] or {})

    def _compute_loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss and number of correct images of a batch or a part of one."""
        with autocast(self.device, self.precision):
            logits = self.model(images)

        loss = F.cross_entropy(
            logits.float(),
            targets,
            weight=self.class_weights,
            label_smoothing=self.label_smoothing,
            reduction="mean" if self.class_weights is None else "none",
        )
        # torch's own mean would divide by the sum of the weights; divided by the number of samples,
        # micro-batches and processes add up to the batch
        if self.class_weights is not None:
            loss = loss.mean()

        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return loss, (logits.detach().argmax(dim=1) == labels).sum()

    def _update_average(self, updates: Tensor) -> None:
        """average ← d · average + (1 − d) · weights, where the step `updates` the weights."""
        if self.average is None:
            return
        # a few operations for all tensors together: a loop would start three kernels for each
        change = torch._foreach_sub(self._values, self._average_values)
        torch._foreach_mul_(change, self._average_weight * updates)
        torch._foreach_add_(self._average_values, change)


def _floating_values(model: nn.Module) -> list[Tensor]:
    """Weights and buffers, but for counters."""
    return [value for value in model.state_dict().values() if value.is_floating_point()]
