"""One training step: the parts of a batch are differentiated, their gradients are added in the
order of the batch, and weights and their average are updated once."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vit.runtime.arguments import first_line
from vit.runtime.device import Precision, autocast, free_cached_memory
from vit.runtime.threads import BatchThreads
from vit.training.losses import StepLoss

# float16 has no numbers between 0 and 6e-8, where many gradients lie. The loss is multiplied by a
# factor before it is differentiated, which is halved after a gradient that is not finite and
# doubled after a number of steps (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).
_FIRST_SCALE = 2.0**16
_STEPS_TO_DOUBLE = 2000
# Steps of each kind before one is captured: they compile, choose kernels, make the optimizer's
# state.
_WARM_UP_STEPS = 3

# from images and targets to the result
RunStep = Callable[[Tensor, Tensor], "StepResult"]
# mean loss times the part's share of the batch, number of right images, gradients of the weights
_Derivative = tuple[Tensor, Tensor, tuple[Tensor, ...]]


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
        model: It may be wrapped in DistributedDataParallel.
        optimizer: It reads `grad_scale` and `found_inf`, as torch's fused optimizers do.
        lr_factor: Factor of all learning rates, from the number of a step, counted from 0.
        loss: See `StepLoss`.
        precision: Precision of the forward pass; weights and gradients are float32.
        clip_grad: Largest L2 norm of all gradients together.
        grad_accum_steps: Parts that a batch is divided into, at least one for each thread.
        ema_decay: Largest decay of the averaged weights. None: no average.
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
        self._parallel: DistributedDataParallel | None = None
        if isinstance(self.model, DistributedDataParallel):
            self._parallel = self.model
            self.module = self.model.module
        # the model to evaluate: the average of the weights, or the model itself without one
        self.averaged_model = self.module
        if self.ema_decay:
            self.averaged_model = copy.deepcopy(self.module).eval().requires_grad_(False)
            # weights and buffers, without counters
            self._values, self._average_values = (
                [value for value in model.state_dict().values() if value.is_floating_point()]
                for model in (self.module, self.averaged_model)
            )
        self.device = next(self.model.parameters()).device
        self.num_steps = 0  # done so far
        # steps of the full schedule for each step of this run; more than 1 if it was shortened
        self.pace = 1.0
        # a step and its place in the schedule, from which the places of the next ones are counted
        self.schedule_start = (0, 0)

        # Numbers that change from step to step are on the device, where a CUDA graph reads them.
        # torch's fused optimizers take a rate as float32 on a GPU, as float64 on a CPU.
        rate_dtype = torch.float32 if self.device.type in ("cuda", "mps") else torch.float64
        for group in self.optimizer.param_groups:
            group["initial_lr"] = group["lr"]
            group["lr"] = torch.zeros((), dtype=rate_dtype, device=self.device)
        self.optimizer.threads = self.threads  # type: ignore[attr-defined]  # Muon divides matrices
        self._average_weight = torch.zeros((), device=self.device)
        first_scale = _FIRST_SCALE if self.precision == "float16" else 1.0
        self.loss_scale = torch.full((), first_scale, device=self.device)
        # steps in a row with finite gradients since the scale was changed
        self._steps_at_scale = torch.zeros((), dtype=torch.int32, device=self.device)

        is_cuda = self.device.type == "cuda"
        self.captures = self.is_capturable and is_cuda and self._parallel is None
        self._num_steps_of_kind: Counter[Hashable] = Counter()
        # kind of steps → replay of their graph, or the step itself if it can't be captured
        self._graphs: dict[Hashable, RunStep] = {}

    @property
    def learning_rate(self) -> float:
        """Learning rate that the first parameter group uses in the next step."""
        full_rate: float = self.optimizer.param_groups[0]["initial_lr"]
        return full_rate * self._find_lr_factor()

    def _find_lr_factor(self) -> float:
        step, place = self.schedule_start
        return self.lr_factor(place + (self.num_steps - step) * self.pace)

    def __call__(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Update the weights by the batch of this process. See `StepLoss` for the targets."""
        self.set_schedule_values()
        run = self._choose_graph(images, targets) if self.captures else self.run_on_device
        result = run(images, targets)
        self.num_steps += 1
        return result

    def set_schedule_values(self) -> None:
        """Copy learning rates and the average's weight, which change from step to step, to the
        device. The average's decay rises from 0.1 to `ema_decay` as (2 + step) / (11 + step), so
        that the first weights are soon forgotten."""
        lr_factor = self._find_lr_factor()
        for group in self.optimizer.param_groups:
            group["lr"].fill_(group["initial_lr"] * lr_factor)
        rising_decay = (2 + self.num_steps) / (11 + self.num_steps)
        self._average_weight.fill_(1 - min(self.ema_decay or 0, rising_decay))

    def _choose_graph(self, images: Tensor, targets: Tensor) -> RunStep:
        """Return the step itself for the first steps of a kind, then the replay of its graph."""
        drop_rate = getattr(self.module, "patch_drop_rate", 0.0)
        kind = (images.shape, targets.shape, targets.dtype, drop_rate, self.grad_accum_steps)
        self._num_steps_of_kind[kind] += 1
        if self._num_steps_of_kind[kind] <= _WARM_UP_STEPS:
            return self.run_on_device
        if kind not in self._graphs:
            try:
                self._graphs[kind] = capture_step(
                    self.run_on_device, self.optimizer, images, targets
                )
            except RuntimeError as error:
                warnings.warn(
                    f"the training step could not be captured as a CUDA graph ({first_line(error)});"
                    " training goes on without it",
                    stacklevel=3,
                )
                # Nothing was computed, but random numbers may have been drawn.
                torch.manual_seed(torch.initial_seed())
                self._graphs[kind] = self.run_on_device
        return self._graphs[kind]

    def run_on_device(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Do all that a step does on the device: nothing is read from there, and the memory is the
        same each time, so that a CUDA graph can be replayed on other batches."""
        # each time, because a callback may freeze weights
        self._trainable = [weight for weight in self.module.parameters() if weight.requires_grad]
        # On a CPU the update runs on the threads that divide the batch; otherwise torch's threads
        # would wait for one another in hundreds of operations.
        with nullcontext() if self.threads is None else self.threads.limit_threads():
            loss, correct = self._differentiate_in_memory(images, targets)
            return self._update(loss, correct)

    def _differentiate_in_memory(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Call `_differentiate`. If it doesn't fit into the memory of a GPU in one process, repeat
        it with the random numbers that follow torch's last seed, from now on in parts of half the
        size."""
        while True:
            try:
                return self._differentiate(images, targets)
            except torch.OutOfMemoryError:
                is_gpu = self.device.type == "cuda"
                is_captured = is_gpu and torch.cuda.is_current_stream_capturing()
                if is_captured or self._parallel or self.grad_accum_steps >= len(images):
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

    def _differentiate(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the number of right images of a batch. Its gradients, times the loss
        scale, are in `.grad`."""
        self.optimizer.zero_grad()
        num_parts = self.grad_accum_steps
        if self.threads is not None:
            # each thread has equally many parts
            num_parts = -(-num_parts // self.threads.count) * self.threads.count
        parts = list(zip(images.chunk(num_parts), targets.chunk(num_parts), strict=True))

        def differentiate(part: tuple[Tensor, Tensor]) -> _Derivative:
            # Processes exchange their gradients with the last part.
            is_last = part is parts[-1]
            with nullcontext() if is_last or not self._parallel else self._parallel.no_sync():
                with autocast(self.device, self.precision):
                    logits = self.model(part[0])
                loss, correct = self.loss(logits, part[1])
                loss = loss * (len(part[0]) / len(images))
                scaled_loss = loss * self.loss_scale
                if self._parallel is not None:
                    scaled_loss.backward()  # type: ignore[no-untyped-call]
                    return loss.detach(), correct, ()
            # Not backward(): threads would add to one .grad in an order that is not fixed.
            gradients = torch.autograd.grad(scaled_loss, self._trainable, allow_unused=True)
            return loss.detach(), correct, gradients

        derivatives: Iterable[_Derivative] = map(differentiate, parts)
        if self.threads is not None:
            derivatives = self.threads.map(differentiate, parts, is_random=True)
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        sums: list[Tensor | None] = []
        # In the order of the batch, so that the sum doesn't depend on which thread is first.
        for part_loss, part_correct, gradients in derivatives:
            loss = loss + part_loss
            correct = correct + part_correct
            sums = list(map(_add, sums or [None] * len(gradients), gradients))

        for weight, gradient in zip(self._trainable, sums, strict=False):
            # torch's fused optimizers read weight and gradient in the order of memory, and a
            # convolution's gradient has another order.
            if gradient is not None and gradient.stride() != weight.stride():
                gradient = torch.empty_like(weight).copy_(gradient)
            weight.grad = gradient
        if self._parallel is not None:
            totals = torch.stack([loss / dist.get_world_size(), correct.float()])
            dist.all_reduce(totals)
            return totals[0], totals[1].long()
        return loss, correct

    @torch.no_grad()
    def _update(self, loss: Tensor, correct: Tensor) -> StepResult:
        """Update the weights, unless loss or gradients are not finite. The gradients are those of
        `loss` times the loss scale."""
        gradients = [weight.grad for weight in self._trainable if weight.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(gradients) / self.loss_scale
        updates = torch.isfinite(grad_norm) & torch.isfinite(loss)
        finite = updates | (torch.isfinite(loss) & (self.loss_scale > 1))
        grad_scale = self.loss_scale
        if self.clip_grad:
            grad_scale = grad_scale * (grad_norm / self.clip_grad).clamp(min=1)

        # torch's fused optimizers divide the gradients by grad_scale, and change nothing if
        # found_inf is 1.
        found_inf = (~updates).float()
        self.optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.precision == "float16":
            # the kernel of torch.amp.GradScaler
            torch._amp_update_scale_(
                self.loss_scale, self._steps_at_scale, found_inf, 2.0, 0.5, _STEPS_TO_DOUBLE
            )
        if self.ema_decay:
            # average ← d · average + (1 − d) · weights, in a few operations for all tensors
            # together; a loop would start three kernels for each
            change = torch._foreach_sub(self._values, self._average_values)
            torch._foreach_mul_(change, self._average_weight * updates)
            torch._foreach_add_(self._average_values, change)
        return StepResult(loss, correct, grad_norm, finite)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a bit-exact continuation needs."""
        loss_scale = None
        if self.precision == "float16":
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
        # The optimizer's state and rates have moved.
        self._num_steps_of_kind.clear()
        self._graphs.clear()
        self.num_steps = state["num_steps"]
        self.grad_accum_steps = state["grad_accum_steps"]
        # A run that goes on in another precision begins with a scale of its own.
        if self.precision == "float16" and state["loss_scale"] is not None:
            self.loss_scale.copy_(state["loss_scale"]["factor"])
            self._steps_at_scale.copy_(state["loss_scale"]["steps"])


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add gradients of a weight; None is that of a weight that the loss doesn't depend on."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return total + gradient


def capture_step(run: RunStep, optimizer: Optimizer, images: Tensor, targets: Tensor) -> RunStep:
    """Capture a step as a CUDA graph, which computes nothing, and return a function that runs it on
    another batch of the same shapes. Raises RuntimeError if it doesn't fit into memory or can't be
    captured.

    A step of a small model has about a hundred kernels of a few microseconds each, and the host
    takes 5 to 10 µs to start one. The replay of a graph starts all of them at once. All that a step
    uses except images and targets must lie at the same addresses each time.
    """
    images, targets = images.clone(), targets.clone()
    graph = torch.cuda.CUDAGraph()
    # torch's AdamW refuses to be captured without this mark, which changes nothing of a fused one,
    # and warns of the mark when it isn't captured.
    groups = [group for group in optimizer.param_groups if group.get("capturable") is False]
    for group in groups:
        group["capturable"] = True
    try:
        with torch.cuda.graph(graph):
            result = run(images, targets)
    finally:
        for group in groups:
            group["capturable"] = False

    def replay(new_images: Tensor, new_targets: Tensor) -> StepResult:
        images.copy_(new_images)
        targets.copy_(new_targets)
        graph.replay()
        # The next replay overwrites the results.
        return StepResult(*(value.clone() for value in result))

    return replay
