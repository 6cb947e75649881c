"""`vit` with one change that its settings don't have, for `ablation.py`: would the change be worth
a setting?

    python research/variants.py VARIANT train RECIPE …

Each change replaces functions of `vit` in this process alone. One process with one thread is
assumed.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import vit.optim.muon
import vit.optim.optimizer
import vit.training.run
from vit.cli.main import main
from vit.model.attention import MultiHeadAttention
from vit.model.blocks import Block
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import autocast
from vit.training.train_step import TrainStep

Loss = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """owner.name ← make(owner.name)"""
    setattr(owner, name, make(getattr(owner, name)))


def prepare_blocks(prepare: Callable[[Any, int], None]) -> None:
    """prepare(block, layer) of every block of a new model."""

    def make(original: Any) -> Callable[..., None]:
        def initialise(self: VisionTransformer, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            for layer, block in enumerate(self.blocks):
                prepare(block, layer)

        return initialise

    replace(VisionTransformer, "__init__", make)


def share_values() -> None:
    """Zhou et al. 2024 (arXiv 2410.17897): values of later blocks are averaged with the first
    block's."""
    first: dict[str, Tensor] = {}

    def prepare(block: Any, layer: int) -> None:
        block.attn.is_first = layer == 0

    def make(original: Any) -> Callable[..., Any]:
        def project(self: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = original(self, *arguments)
            if self.is_first:
                first["values"] = v
                return q, k, v
            return q, k, (v + first["values"]) / 2

        return project

    prepare_blocks(prepare)
    replace(MultiHeadAttention, "_project", make)


def add_embeddings() -> None:
    """Jordan et al. 2024, modded-nanogpt: later blocks read a · tokens + b · embeddings; a and b
    are learned, from 1 and 0."""
    first: dict[str, Tensor] = {}

    def prepare(block: Any, layer: int) -> None:
        block.shares = torch.nn.Parameter(torch.tensor([1.0, 0.0])) if layer else None

    def make(original: Any) -> Callable[..., Any]:
        def forward(self: Any, tokens: Tensor, *, num_out_tokens: int | None = None) -> Any:
            if self.shares is None:
                first["tokens"] = tokens
            else:
                tokens = self.shares[0] * tokens + self.shares[1] * first["tokens"]
            return original(self, tokens, num_out_tokens=num_out_tokens)

        return forward

    prepare_blocks(prepare)
    replace(Block, "forward", make)


def cap_logits() -> None:
    """Gemma Team 2024 (arXiv 2408.00118): logits ← 5 · tanh(logits / 5). Label smoothing of 0.1
    asks for a gap of 4.5 between the classes."""
    replace(
        VisionTransformer,
        "forward_head",
        lambda original: lambda *given: 5 * torch.tanh(original(*given) / 5),
    )


def iterate_less() -> None:
    """Muon with three Newton–Schulz steps instead of five."""
    replace(vit.optim.muon, "orthogonalize", lambda original: partial(original, steps=3))


def divide_heads() -> None:
    """Muon on each head's query, key and value, instead of all heads' together."""

    def make(original: Any) -> Callable[..., Any]:
        def divide(model: VisionTransformer, **options: Any) -> list[dict[str, Any]]:
            groups: list[dict[str, Any]] = original(model, **options)
            for group in groups:
                group["num_matrices"] *= (
                    model.architecture["num_heads"] if group["num_matrices"] == 3 else 1
                )
            return groups

        return divide

    replace(vit.optim.optimizer, "parameter_groups", make)


def replace_loss(compute: Loss) -> None:
    """compute(step, images, labels) gives the loss, and logits and labels of the images that it is
    of."""

    def compute_loss(self: TrainStep, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self.precision):
            loss, logits, labels = compute(self, images, labels)
        return loss, (logits.detach().argmax(dim=1) == labels).sum()

    replace(TrainStep, "_compute_loss", lambda _: compute_loss)


def count_steps() -> dict[str, int]:
    """`total` of the run, once it is built."""
    counted: dict[str, int] = {}

    def make(original: Any) -> Callable[..., Any]:
        def schedule_factor(step: int, **options: Any) -> Any:
            counted["total"] = options["total_steps"]
            return original(step, **options)

        return schedule_factor

    replace(vit.training.run, "schedule_factor", make)
    return counted


def skip_easy_images() -> None:
    """Jiang et al. 2019 (arXiv 1910.00762), with the settings of MosaicML's Composer: between a
    half and nine tenths of the run only the half of a batch with the largest loss is learned
    from."""
    counted = count_steps()

    def compute(step: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if 0.5 <= step.num_steps / counted["total"] < 0.9:
            with torch.no_grad():
                losses = F.cross_entropy(step.model(images).float(), labels, reduction="none")
            chosen = losses.topk(len(images) // 2).indices
            images, labels = images[chosen], labels[chosen]
        logits = step.model(images)
        return (
            F.cross_entropy(logits.float(), labels, label_smoothing=step.label_smoothing),
            logits,
            labels,
        )

    replace_loss(compute)


def learn_from_average() -> None:
    """Self-distillation: in the second half of the run, half of the loss is the cross-entropy with
    the probabilities of the averaged weights (mean teacher, Tarvainen and Valpola 2017, with every
    image labelled)."""
    counted = count_steps()

    def compute(step: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = step.model(images)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=step.label_smoothing)
        if step.num_steps >= 0.5 * counted["total"]:
            with torch.no_grad():
                teacher = step.average(images).float().softmax(dim=1)
            loss = (loss + F.cross_entropy(logits.float(), teacher)) / 2
        return loss, logits, labels

    replace_loss(compute)


def learn_with_half_of_patches() -> None:
    """Heo et al. 2023 (arXiv 2306.11339, MaskSub): half of the loss is that of the model with half
    of the patches dropped, whose targets are the whole model's probabilities."""

    def compute(step: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = step.model(images)
        step.module.patch_drop_rate = 0.5
        some = step.model(images)
        step.module.patch_drop_rate = 0.0
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=step.label_smoothing)
        targets = logits.detach().float().softmax(dim=1)
        return (loss + F.cross_entropy(some.float(), targets)) / 2, logits, labels

    replace_loss(compute)


def predict_patches_first() -> None:
    """SimMIM (Xie et al. 2022, arXiv 2111.09886), without labels, in the first fifth of the run:
    six tenths of the tokens, drawn at random, are replaced by a learned one, and a linear map
    predicts the pixels of their patches. The loss is the mean absolute difference."""
    counted = count_steps()
    hidden: list[Tensor] = []

    def make(original: Any) -> Callable[..., None]:
        def initialise(self: VisionTransformer, *arguments: Any, **options: Any) -> None:
            original(self, *arguments, **options)
            rows, columns = self.patch_embed.patch_size
            self.mask_token = torch.nn.Parameter(torch.zeros(self.embed_dim))
            self.predict = torch.nn.Linear(self.embed_dim, 3 * rows * columns)
            self.patch_embed.register_forward_hook(hide)

        return initialise

    def hide(embedding: Any, images: Any, tokens: Tensor) -> Tensor:
        return torch.where(hidden[0], hidden[1], tokens) if hidden else tokens

    def compute(step: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model, size = step.module, step.module.patch_embed.patch_size
        if step.num_steps >= counted["total"] / 5:
            logits = step.model(images)
            return (
                F.cross_entropy(logits.float(), labels, label_smoothing=step.label_smoothing),
                logits,
                labels,
            )
        patches = F.unfold(images, size, stride=size).transpose(1, 2)
        hidden[:] = torch.rand_like(patches[..., :1]) < 0.6, model.mask_token
        predicted = model.predict(model.forward_features(images)).float()
        where = hidden[0].expand_as(patches)
        hidden.clear()
        return (
            F.l1_loss(predicted[where], patches[where]),
            images.new_zeros(len(labels), model.num_classes),
            labels,
        )

    replace(VisionTransformer, "__init__", make)
    replace_loss(compute)


def sharpen_last_steps() -> None:
    """SAM (Foret et al. 2021, arXiv 2010.01412, radius 0.05) in the last fifth of the run alone
    (Zhou et al. 2024, arXiv 2410.10373): gradients are taken where the weights are moved up the
    loss's slope by the radius."""
    counted = count_steps()
    moved: list[tuple[Tensor, Tensor]] = []

    def make_run(original: Any) -> Callable[..., Any]:
        def run(self: Any, images: Tensor, targets: Tensor) -> Any:
            if self.num_steps >= 0.8 * counted["total"]:
                parameters = [
                    parameter for parameter in self.module.parameters() if parameter.requires_grad
                ]
                gradients = torch.autograd.grad(self._forward(images, targets)[0], parameters)
                radius = 0.05 / torch.nn.utils.get_total_norm(gradients)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        moved.append((parameter, parameter.clone()))
                        parameter.add_(gradient * radius)
            return original(self, images, targets)

        return run

    def make_update(original: Any) -> Callable[..., Any]:
        @torch.no_grad()
        def update(self: Any, *arguments: Any) -> Any:
            for parameter, before in moved:
                parameter.copy_(before)
            moved.clear()
            return original(self, *arguments)

        return update

    replace(TrainStep, "run_on_device", make_run)
    replace(TrainStep, "update", make_update)


VARIANTS: dict[str, Callable[[], None]] = {
    "selective backpropagation": skip_easy_images,
    "self-distillation from the averaged weights": learn_from_average,
    "value residuals": share_values,
    "Muon on each head": divide_heads,
    "SAM in the last fifth": sharpen_last_steps,
    "three Newton–Schulz steps": iterate_less,
    "half of the loss with half of the patches (MaskSub)": learn_with_half_of_patches,
    "embeddings added again before the second block": add_embeddings,
    "logits capped at 5": cap_logits,
    "masked patches predicted in the first fifth (SimMIM)": predict_patches_first,
}

if __name__ == "__main__":
    VARIANTS[sys.argv[1]]()
    main(sys.argv[2:])
