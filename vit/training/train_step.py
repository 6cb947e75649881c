"""One training step: forward pass, backward pass, update of the weights and of their average."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from vit.model.checkpoint import StepState, check_number
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import Precision, allow_tf32, autocast, free_cached_memory
from vit.runtime.threads import BatchThreads
from vit.training.compiled_function import CompiledBlocks, CompiledFunction
from vit.training.loss_scale import LossScale
from vit.training.step_graphs import StepGraphs
from vit.training.threaded_step import forward_backward_on_threads

# (logits [B, C], classes [B] or class probabilities [B, C]) → the loss of each image [B], or the
# mean
Loss = Callable[[Tensor, Tensor], Tensor]
# Temperature at which a student's predictions are compared with its teacher's.
TEACHER_TEMPERATURE = 3.0


class StepResult(NamedTuple):
    """The result of a step over all processes: tensors on the device, so that nothing waits for it.

    Attributes:
        loss: Mean over the global batch, before the update.
        correct: Number of images of the global batch whose largest logit is the label's, or of
            which all labels are right.
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
        precision: Precision of the forward pass; weights and gradients are float32. In float16 the
            loss is scaled, see `vit.training.loss_scale`.
        loss: Loss instead of the cross-entropy.
        has_teacher: A teacher's logits follow the class probabilities in the targets. See
            `vit.training.teacher`.
        multilabel: An image may have several labels: the loss is the mean binary cross-entropy.
        asymmetric: With several labels, the loss is `compute_asymmetric_loss`.
        label_smoothing: Label smoothing of `torch.nn.functional.cross_entropy`, from 0 to 1.
        class_weights: Factor of a sample's loss for each class; their mean over the training images
            is 1. None: all classes have the same weight. With several labels an image it is the
            factor of the loss where an image has the label.
        clip_grad: Largest L2 norm of all gradients together; None doesn't clip.
        grad_accum_steps: Micro-batches of near-equal size that a batch is divided into. Their
            gradients add up to those of the whole batch.
        ema_decay: Decay of the average of the weights; None keeps no average.
        tf32: See `vit.runtime.device.allow_tf32`.
        compile: Compile the forward pass and the loss, and with them the backward pass; on a GPU
            and in several processes, the encoder blocks of a model of ours.
        threads: Threads of a CPU that divide the batch, for a model that is not wrapped. Each takes
            at least one micro-batch.
        capture_stream: Stream in which the model was wrapped, if its steps may be captured. See
            `vit.training.step_graphs.choose_capture_stream`.
    """

    model: nn.Module
    optimizer: Optimizer
    lr_factor: Callable[[float], float]
    _: KW_ONLY
    precision: Precision = "bfloat16"
    loss: Loss | None = None
    has_teacher: bool = False
    multilabel: bool = False
    asymmetric: bool = False
    label_smoothing: float = 0.0
    class_weights: Float[Tensor, " C"] | None = None
    clip_grad: float | None = None
    grad_accum_steps: int = 1
    ema_decay: float | None = None
    tf32: bool = False
    compile: bool = False
    threads: BatchThreads | None = None
    capture_stream: torch.cuda.Stream | None = None

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
        self._forward: Callable[..., Any] = self._compute_loss
        if self.compile:
            self._forward = self._build_compiled()

        self.num_steps = 0  # done so far

        # Numbers that change from step to step are on the device, where a CUDA graph reads them.
        # torch's fused optimizers take a rate as float32 on a GPU, as float64 on a CPU.
        rate_dtype = torch.float32 if self.device.type in ("cuda", "mps") else torch.float64
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
        # Other models and losses may do something else in each step, by numbers of the host.
        # torch's gradient checkpointing reads the state of the device's random numbers.
        is_capturable = isinstance(self.module, VisionTransformer) and self.loss is None
        is_capturable &= self.module is self.model or self.capture_stream is not None
        if is_capturable and not self.module.grad_checkpointing and self.device.type == "cuda":
            self.graphs = StepGraphs(
                self.run_on_device,
                self.optimizer,
                self.device,
                rehearse=None if self.module is self.model else self.rehearse,
                stream=self.capture_stream,
            )

    def _build_compiled(self) -> CompiledFunction:
        """Compile the blocks alone where time is dear or gradients are exchanged: on a GPU and in
        several processes. On a CPU the whole is compiled, once for each size."""
        is_alone = self.module is self.model and self.device.type == "cpu"
        if isinstance(self.module, VisionTransformer) and not is_alone:
            return CompiledBlocks(self._compute_loss, self.module.blocks)
        return CompiledFunction(self._compute_loss)

    @property
    def learning_rate(self) -> float:
        """Learning rate that the first parameter group uses in the next step."""
        return self._full_rates[0] * self.lr_factor(self.num_steps)

    @property
    def averaged_model(self) -> nn.Module:
        """The model to evaluate: the average of the weights, or the model itself without one."""
        return self.module if self.average is None else self.average

    def describe_execution(self) -> dict[str, Any]:
        """Return how the steps are run, where that is measured: on a GPU, with a model of ours."""
        if self.graphs is None:
            return {}
        compiled = isinstance(self._forward, CompiledFunction) and self._forward.is_compiled
        return {"compiled": compiled, **self.graphs.describe()}

    def __call__(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Update the weights.

        Args:
            images: Batch of this process.
            targets: Classes [B], class probabilities [B, C], or which labels an image has [B, C];
                with a teacher, its logits follow.
        """
        self.set_schedule_values()
        with allow_tf32(self.tf32):
            if self.graphs is None:
                result = self.run_on_device(images, targets)
            else:
                settings = (getattr(self.module, "patch_drop_rate", 0.0), self.grad_accum_steps)
                result = self.graphs(images, targets, settings=settings)
        self.num_steps += 1
        return result

    def run_on_device(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Do all that a step does on the device, with the values of `set_schedule_values`. It reads
        nothing from the device and uses the same memory each time, so that a CUDA graph of it can
        be replayed on other batches in the same place."""
        # Gradients are made anew instead of added to zeros. While a CUDA graph is captured they are
        # in the graph's own memory, where each replay writes them.
        self.optimizer.zero_grad()

        if self.threads is None or len(images) == 1:
            loss, correct = self._forward_backward_in_memory(images, targets)
            return self.update(loss, correct)

        # On a CPU each thread differentiates a part of the batch. The update runs on the same
        # threads; otherwise torch's threads would wait for one another in hundreds of operations.
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

    def rehearse(self, images: Tensor, targets: Tensor) -> Any:
        """Compute the gradients of this process alone, without the model's wrapper."""
        self.optimizer.zero_grad()
        wrapped, self.model = self.model, self.module
        try:
            return self.forward_backward(images, targets)
        finally:
            self.model = wrapped

    def _forward_backward_in_memory(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Call `forward_backward`. If it doesn't fit into a GPU's memory, repeat it with the random
        numbers that follow torch's last seed, from now on in micro-batches of half the size."""
        start_count = self.grad_accum_steps
        while True:
            try:
                loss, correct = self.forward_backward(images, targets)
                break
            except torch.OutOfMemoryError:
                # Other processes may be waiting for this one's gradients, or a graph is captured.
                can_repeat = not isinstance(self.model, DistributedDataParallel)
                if self.device.type == "cuda":
                    can_repeat &= not torch.cuda.is_current_stream_capturing()
                if not can_repeat or self.grad_accum_steps >= len(images):
                    raise
            # Not above, where the error still holds the tensors of the failed pass.
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
        """Return the loss and the number of correct images of a batch. Its gradients, times the
        loss scale, are in `.grad`."""
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        micro_images = images.chunk(self.grad_accum_steps)
        micro_targets = targets.chunk(self.grad_accum_steps)
        for number, micro_batch in enumerate(zip(micro_images, micro_targets, strict=True), 1):
            # Processes exchange gradients once, with the last micro-batch.
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
        """Update the weights, unless loss or gradients are not finite. The gradients are those of
        `loss` times the loss scale."""
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

        # torch's fused optimizers divide the gradients by grad_scale, and change nothing if
        # found_inf is 1.
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
        """Copy learning rates and the average's weight, which change from step to step, to the
        device. The average's decay rises from 0.1 to `ema_decay` as (2 + step) / (11 + step), so
        that the first weights are soon forgotten."""
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
            "grad_accum_steps": self.grad_accum_steps,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: StepState) -> None:
        """Continue where `state_dict` was taken, on this step's device.

        Raises:
            RuntimeError: The state is damaged or of another model.
        """
        num_steps = state["num_steps"]
        self.module.load_state_dict(state["model"])
        self.averaged_model.load_state_dict(state["average"])
        for module in (self.module, self.averaged_model):
            for name, weight in module.named_parameters():
                if not weight.isfinite().all():
                    raise RuntimeError(f"{name} holds NaN or infinite weights")
        # The settings of the groups are the run's own.
        own = self.optimizer.state_dict()
        self._check_optimizer_state(state["optimizer"], own["param_groups"], num_steps=num_steps)
        self.optimizer.load_state_dict({**own, "state": state["optimizer"]["state"]})
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        if self.graphs is not None:
            self.graphs.forget()
        self.num_steps = int(num_steps)
        self.grad_accum_steps = int(state["grad_accum_steps"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"] or {})
            self.loss_scale.check()

    def _check_optimizer_state(
        self, state: dict[str, Any], groups: list[dict[str, Any]], *, num_steps: int
    ) -> None:
        """Raise RuntimeError for values that torch would take, to fail at the next step or never.

        Args:
            state: State of the optimizer, from a file.
            groups: This optimizer's groups, as a state has them.
            num_steps: Steps that the state was taken after.
        """
        numbers = [group["params"] for group in groups]
        if numbers != [group["params"] for group in state["param_groups"]]:
            raise RuntimeError("the optimizer's state is of other parameters")
        parameters = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        shapes = dict(zip(chain(*numbers), (weight.shape for weight in parameters), strict=True))
        for number, values in state["state"].items():
            for name, value in values.items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    raise RuntimeError("the optimizer's state holds more than tensors")
                if name == "step":
                    check_number("the optimizer's step", value, least=0, most=num_steps)
                elif value.shape != shapes[number] or not value.isfinite().all():
                    raise RuntimeError(f"the optimizer's {name} is not that of a weight")

    def _compute_loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss and the number of correct images of a batch or a part of one."""
        with autocast(self.device, self.precision):
            logits = self.model(images)
        if self.has_teacher:
            targets, teacher_logits = targets.chunk(2, dim=1)

        if self.loss is not None:
            loss = self._weigh(self.loss(logits.float(), targets), targets).mean()
        elif self.multilabel:
            smoothed = targets + self.label_smoothing * (0.5 - targets)
            if self.asymmetric:
                loss = compute_asymmetric_loss(logits.float(), smoothed)
            else:
                loss = F.binary_cross_entropy_with_logits(
                    logits.float(), smoothed, pos_weight=self.class_weights
                )
        else:
            loss = self._compute_cross_entropy(logits.float(), targets)
        if self.has_teacher:
            loss = loss + compute_teacher_loss(logits.float(), teacher_logits)

        if self.multilabel:
            is_right = (logits.detach() > 0) == (targets > 0.5)
            return loss, is_right.all(dim=1).sum()
        if targets.ndim == 2:
            targets = targets.argmax(dim=1)
        return loss, (logits.detach().argmax(dim=1) == targets).sum()

    def _compute_cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean cross-entropy, where each image has the weight of its class.

        torch's own would weigh the smoothing by the other classes' weights: a common image whose
        class is certain would be pulled to a rare class by its large weight. It would also divide by
        the sum of the weights, so that micro-batches would not add up to the batch.
        """
        smoothing = self.label_smoothing
        if self.class_weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        if targets.ndim == 1:
            targets = F.one_hot(targets, logits.shape[1])
        targets = targets * self.class_weights
        smoothed = targets.lerp(targets.mean(dim=1, keepdim=True).expand_as(targets), smoothing)
        return F.cross_entropy(logits, smoothed)

    def _weigh(self, losses: Tensor, targets: Tensor) -> Tensor:
        """Multiply losses of images, from a function of the user, by the weights of their classes."""
        if self.class_weights is None:
            return losses
        if targets.ndim == 1:
            return losses * self.class_weights[targets]
        return losses * (targets @ self.class_weights)

    def _update_average(self, updates: Tensor) -> None:
        """Compute average ← d · average + (1 − d) · weights, if the step `updates` the weights."""
        if self.average is None:
            return
        # A few operations for all tensors together; a loop would start three kernels for each.
        change = torch._foreach_sub(self._values, self._average_values)
        torch._foreach_mul_(change, self._average_weight * updates)
        torch._foreach_add_(self._average_values, change)


def compute_teacher_loss(
    logits: Float[Tensor, "B C"], teacher_logits: Float[Tensor, "B C"]
) -> Float[Tensor, ""]:
    """Compute the mean divergence of the student's predictions from the teacher's, both softened by
    the temperature T, times T² (Hinton, Vinyals & Dean 2015, "Distilling the knowledge in a neural
    network")."""
    student, teacher = (
        F.log_softmax(values / TEACHER_TEMPERATURE, dim=1) for values in (logits, teacher_logits)
    )
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return TEACHER_TEMPERATURE**2 * divergence


def compute_asymmetric_loss(
    logits: Float[Tensor, "B C"], targets: Float[Tensor, "B C"]
) -> Float[Tensor, ""]:
    """Compute the mean asymmetric loss (Ridnik et al. 2021, "Asymmetric loss for multi-label
    classification"), with the paper's γ₊ = 1, γ₋ = 4 and margin 0.05.

    An image without the label that is easy counts little, and nothing if the label's probability is
    below the margin. So the few images with a rare label aren't drowned out.

    Args:
        logits: Logits.
        targets: 1 for labels that are there, 0 for others, and values between them if they are
            smoothed or mixed.
    """
    probabilities = torch.sigmoid(logits)
    present = (1 - probabilities) * F.logsigmoid(logits)
    shifted = (probabilities - 0.05).clamp(min=0)
    absent = shifted**4 * torch.log1p(-shifted)
    return -(targets * present + (1 - targets) * absent).mean()


def _floating_values(model: nn.Module) -> list[Tensor]:
    """Return weights and buffers, without counters."""
    return [value for value in model.state_dict().values() if value.is_floating_point()]
