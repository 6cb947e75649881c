"""One optimisation step: forward, backward, guarded update, average of the weights."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from vit.training.ema import WeightAverage

Precision = Literal["float32", "bfloat16", "float16"]


class StepResult(NamedTuple):
    """What a step leaves for the log: tensors on the device, nothing waited for. Over all ranks."""

    loss: Float[Tensor, ""]  # mean over the global batch, before the update
    correct: Int[Tensor, ""]  # images of the global batch whose largest logit is the label's
    grad_norm: Float[Tensor, ""]  # before clipping
    finite: Bool[Tensor, ""]  # False: loss or gradient was not finite, and nothing was updated


class TrainStep:
    """Trains `model`, which may be wrapped in DistributedDataParallel or sharded by FSDP2, by one batch a call.

    A batch goes through in `accumulate` parts of near-equal size whose gradients add up to the whole batch's.
    A non-finite loss or gradient changes neither weights nor optimizer nor average: the guard works on the
    device. float16 scales its loss by a factor that halves at each overflow and doubles after 2000 good steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler,
        *,
        precision: Precision = "bfloat16",
        label_smoothing: float = 0.0,
        clip_grad: float | None = None,
        accumulate: int = 1,
        ema_decay: float | None = None,
        average_model: nn.Module | None = None,
        halt_on_nonfinite: bool = False,
        compile: bool = False,
    ) -> None:
        if precision not in get_args(Precision):
            raise ValueError(
                f"unknown precision {precision!r}; known: {', '.join(sorted(get_args(Precision)))}"
            )
        if accumulate < 1:
            raise ValueError(f"accumulate {accumulate} is not positive; 1 takes the whole batch at once")
        self.model = model
        self.module = cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model
        self.optimizer = optimizer
        self.schedule = schedule
        self.precision = precision
        self.label_smoothing = label_smoothing
        self.clip_grad = clip_grad
        self.accumulate = accumulate
        self.halt_on_nonfinite = halt_on_nonfinite
        self.step = 0
        self.device = next(model.parameters()).device
        self.nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._loss_scale = torch.tensor(65536.0 if precision == "float16" else 1.0, device=self.device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.average = (
            WeightAverage(average_model or copy.deepcopy(self.module), decay=ema_decay) if ema_decay else None
        )
        self._forward = torch.compile(self._compute_loss) if compile else self._compute_loss

    @property
    def averaged_model(self) -> nn.Module:
        """The model to evaluate: the weights' average, or the model itself where none is kept."""
        return self.average.model if self.average else self.module

    def __call__(self, images: Float[Tensor, "B 3 H W"], targets: Tensor) -> StepResult:
        """Update the weights. `targets` are classes [B] or the classes' shares [B, C]."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        parts = list(zip(images.chunk(self.accumulate), targets.chunk(self.accumulate), strict=True))
        for i, (part_images, part_targets) in enumerate(parts):
            with self._unsynchronized(until_last=i == len(parts) - 1):
                part_loss, part_correct = self._forward(part_images, part_targets)
                part_loss = part_loss * (len(part_images) / len(images))
                torch.autograd.backward(part_loss * self._loss_scale)
            loss += part_loss.detach()
            correct += part_correct
        return self._update(loss, correct)

    def _compute_loss(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with self.autocast():
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)
        labels = targets if targets.ndim == 1 else targets.argmax(dim=1)
        return loss, (logits.detach().argmax(dim=1) == labels).sum()

    def autocast(self) -> AbstractContextManager[Any]:
        """The forward pass's precision, for evaluation as well."""
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, self.precision))

    @contextmanager
    def _unsynchronized(self, *, until_last: bool) -> Iterator[None]:
        """Ranks exchange gradients once, with the last part."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(until_last)
        wait = isinstance(self.model, DistributedDataParallel) and not until_last
        with cast(DistributedDataParallel, self.model).no_sync() if wait else nullcontext():
            yield

    @torch.no_grad()
    def _update(self, loss: Tensor, correct: Tensor) -> StepResult:
        if isinstance(self.model, DistributedDataParallel | FSDPModule):
            totals = torch.stack([loss / dist.get_world_size(), correct.float()])
            dist.all_reduce(totals)
            loss, correct = totals[0], totals[1].long()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):  # of shards
            norm = norm.full_tensor()
        norm = norm / self._loss_scale
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        if self.halt_on_nonfinite:
            finite &= self.nonfinite_steps == 0
        # torch's fused optimizers divide the gradients by the one and stand still where the other is 1
        scale = (
            self._loss_scale * (norm / self.clip_grad).clamp(min=1) if self.clip_grad else self._loss_scale
        )
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
        self.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.nonfinite_steps += ~finite
        if self.average:
            self.average.update(self.module, unless=~finite, step=self.step)
        if self.precision == "float16":
            self._good_steps = torch.where(finite, self._good_steps + 1, 0)
            grow = torch.where(self._good_steps % 2000 == 0, 2.0, 1.0)
            self._loss_scale = torch.where(finite, self._loss_scale * grow, self._loss_scale / 2)
        return StepResult(loss, correct, norm, finite)

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact continuation needs besides weights, their average, optimizer and schedule."""
        return {
            "step": self.step,
            "nonfinite_steps": self.nonfinite_steps,
            "loss_scale": self._loss_scale,
            "good_steps": self._good_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.step = state["step"]
        self.nonfinite_steps.copy_(state["nonfinite_steps"])
        self._loss_scale.copy_(state["loss_scale"])
        self._good_steps.copy_(state["good_steps"])


def find_nonfinite(model: nn.Module, images: Tensor, targets: Tensor | None = None) -> str | None:
    """Name of the first module whose output, or of the first parameter whose gradient, is not finite.

    Runs `model` again on the batch that failed; call it under the same autocast. None where all is finite.
    The forward pass is searched first, then with `targets` the gradients of the cross-entropy from the head
    down. Leaves no gradient behind.
    """
    found: list[str] = []

    def watch(name: str) -> Any:
        def check(module: nn.Module, arguments: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(name)

        return check

    hooks = [module.register_forward_hook(watch(name or "model")) for name, module in model.named_modules()]
    try:
        logits = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    if found or targets is None:
        return found[0] if found else None
    loss = F.cross_entropy(logits.float(), targets)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
        if gradient is not None and not torch.isfinite(gradient).all():
            return f"gradient of {name}"
    return None
