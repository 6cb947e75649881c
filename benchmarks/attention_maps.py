"""Attention rollout: this project's beside the reference implementation, end to end and alone.

    OMP_NUM_THREADS=2 python benchmarks/attention_maps.py --output benchmarks/results

The reference implementation is what most pictures are made with: one image at a time, a hook on
every unfused attention that copies the weights to the CPU, heads fused, products of whole N×N
matrices. It is run with its customary 90 % discarding and without any. Ours takes the images in
batches and reads the map through the class token, on this project's model and on timm's with fused
attention left on, both with the same weights. "Rollout alone" starts in both from the stored
attention; "attention and rollout" from stored queries and keys, as ours does end to end. The
variants take turns round by round, in one process, on the same weights and images; a result is the
median over the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm.models
import torch
from conditions import describe_conditions, write_result
from torch import Tensor, nn

from vit.analysis.faithfulness.map_metrics import to_markdown
from vit.explanation.capture.forward import run_forward
from vit.explanation.explainer import choose_explain_batch_size
from vit.explanation.methods.maps import compute_maps
from vit.explanation.methods.rollout import attention_rollout, compute_rollout
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.device import choose_device
from vit.runtime.memory import keep_freed_memory

# name: (architecture, images of a batch, images of the reference implementation a round)
MODELS: dict[str, tuple[dict[str, int], int, int]] = {
    "CIFAR ViT, d192 L9 H3, 65 tokens": (
        {
            "img_size": 32,
            "patch_size": 4,
            "embed_dim": 192,
            "depth": 9,
            "num_heads": 3,
            "num_classes": 10,
        },
        256,
        32,
    ),
    "ViT-Ti/16 at 224": ({"embed_dim": 192, "depth": 12, "num_heads": 3}, 32, 8),
    "ViT-B/16 at 224": ({"embed_dim": 768, "depth": 12, "num_heads": 12}, 16, 4),
}


Variant = tuple[Callable[[], object], int]  # the work of one round, and how many images that is


class Reference:
    """Rollout the usual way, for one image at a time."""

    def __init__(self, model: nn.Module, *, discard_ratio: float) -> None:
        self.model, self.discard_ratio = model, discard_ratio
        self.attentions: list[Tensor] = []
        for block in model.blocks:
            block.attn.fused_attn = False
            block.attn.attn_drop.register_forward_hook(
                lambda module, args, out: self.attentions.append(out.cpu())
            )

    def explain(self, image: Tensor) -> Tensor:
        self.attentions.clear()
        with torch.no_grad():
            self.model(image[None])
        return self.roll_out()

    def roll_out(self) -> Tensor:
        """From the stored weights [1, H, N, N] of each layer to a map [P]."""
        identity = torch.eye(self.attentions[0].shape[-1])
        result = identity
        for attention in self.attentions:
            fused = attention.mean(dim=1)
            if self.discard_ratio:
                flat = fused.reshape(1, -1)
                lowest = flat.topk(
                    int(flat.shape[1] * self.discard_ratio), dim=-1, largest=False
                ).indices
                flat[0, lowest[lowest != 0]] = 0
            mixing = (fused + identity) / 2
            result = (mixing / mixing.sum(dim=-1, keepdim=True)) @ result
        return result[0, 0, 1:]


def build_variants(
    ours: nn.Module, theirs: nn.Module, images: Tensor, *, micro_batch: int
) -> dict[str, Variant]:
    """What this project does, and the forward passes beside it."""
    device, batch = images.device, len(images)
    micro_batches = images.split(micro_batch)

    def bfloat16() -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16)

    def each(
        work: Callable[[Tensor], object], context: Callable[[], Any] = nullcontext
    ) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad(), context():
                for micro_batch in micro_batches:
                    work(micro_batch)

        return run

    def explain_ours(images: Tensor) -> object:
        return compute_maps(ours, images)

    def explain_theirs(images: Tensor) -> object:
        return compute_maps(theirs, images)

    with torch.no_grad():
        forwards = [run_forward(ours, micro_batch) for micro_batch in micro_batches]
        stored = [forward.record.attentions for forward in forwards]

    def from_attention() -> None:
        for forward, attentions in zip(forwards, stored, strict=True):
            attention_rollout(attentions, pool_weights=forward.pool_weights)

    def from_queries() -> None:
        for forward in forwards:
            compute_rollout(forward, forward.logits)

    return {
        "forward pass": (each(ours), batch),
        "forward pass, recorded": (each(lambda images: run_forward(ours, images)), batch),
        "ours": (each(explain_ours), batch),
        "ours on timm's model": (each(explain_theirs), batch),
        "forward pass, bfloat16": (each(ours, bfloat16), batch),
        "ours, bfloat16": (each(explain_ours, bfloat16), batch),
        "ours on timm's model, bfloat16": (each(explain_theirs, bfloat16), batch),
        "rollout alone, ours": (from_attention, batch),
        "attention and rollout, ours": (from_queries, batch),
    }


def build_references(build: Callable[[], nn.Module], images: Tensor) -> dict[str, Variant]:
    """The reference implementation on `images`, one after the other."""
    variants: dict[str, Variant] = {}
    for name, discard_ratio in (("reference", 0.0), ("reference, 90 % discarded", 0.9)):
        program = Reference(build(), discard_ratio=discard_ratio)

        def explain(program: Reference = program) -> None:
            for image in images:
                program.explain(image)

        def roll_out(program: Reference = program) -> None:
            with torch.no_grad():
                for _ in images:
                    program.roll_out()

        program.explain(images[0])
        variants[name] = (explain, len(images))
        variants[f"rollout alone, {name}"] = (roll_out, len(images))
    return variants


def take_turns(
    variants: dict[str, Variant],
    *,
    rounds: int,
    device: torch.device,
    report: Callable[[dict[str, float]], object] = lambda rates: None,
) -> dict[str, float]:
    """Images a second of each variant: the median of the rounds after a first that only warms up.
    `report` gets those that are known, after every round."""
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, (work, images) in variants.items():
            _wait(device)
            started = time.perf_counter()
            work()
            _wait(device)
            if number:
                rates[name].append(images / (time.perf_counter() - started))
        if number:
            report({name: statistics.median(values) for name, values in rates.items()})
    return {name: statistics.median(values) for name, values in rates.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_agreement(model: nn.Module, theirs: nn.Module, image: Tensor) -> float:
    """The largest difference between our map and the reference's (without discarding) of one
    image."""
    _, _, (maps,) = compute_maps(model, image[None])
    program = Reference(theirs, discard_ratio=0.0)
    return float((maps.values.flatten().cpu() - program.explain(image)).abs().max())


def compare(rates: dict[str, float]) -> dict[str, float]:
    """Ratios of the rates."""
    ratios = {}
    for reference in ("reference", "reference, 90 % discarded"):
        for variant in (
            "ours",
            "ours on timm's model",
            "ours, bfloat16",
            "ours on timm's model, bfloat16",
        ):
            ratios[f"end to end: {variant} / {reference}"] = rates[variant] / rates[reference]
        alone = f"rollout alone, {reference}"
        ratios[f"rollout alone: ours / {reference}"] = rates["rollout alone, ours"] / rates[alone]
    ratios["recording costs"] = rates["forward pass"] / rates["forward pass, recorded"] - 1
    ratios["explaining costs"] = rates["forward pass"] / rates["ours"] - 1
    return ratios


def measure_model(
    name: str, device: torch.device, *, rounds: int, micro_batch: int | None
) -> dict[str, Any]:
    """Rates and ratios of one of MODELS, printed and returned."""
    architecture, batch, reference_images = MODELS[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return timm.models.VisionTransformer(**architecture).eval().to(device)

    theirs = build()
    ours = VisionTransformer(**architecture).eval().to(device)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(batch, 3, *ours.patch_embed.img_size, device=device)
    default = batch
    if device.type == "cpu":
        default = choose_explain_batch_size(ours.patch_embed.img_size, device)
    micro_batch = micro_batch or default
    variants = build_variants(ours, theirs, images, micro_batch=micro_batch)
    rates = take_turns(
        variants | build_references(build, images[:reference_images]), rounds=rounds, device=device
    )
    print(f"\n{name}")
    print(
        to_markdown(["variant", "images/s"], [[key, f"{rate:.1f}"] for key, rate in rates.items()])
    )
    print(to_markdown(["", ""], [[what, f"{ratio:.2f}"] for what, ratio in compare(rates).items()]))
    return {
        "batch": batch,
        "micro_batch": micro_batch,
        "images_per_second": rates,
        "ratios": compare(rates),
        "largest_difference_from_reference": check_agreement(ours, build(), images[0]),
    }


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=None,
        help="default: what `vit attention` takes on a CPU, else the batch",
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--output", type=Path, help="folder for attention-maps-<machine>.json")
    chosen = parser.parse_args()
    device = choose_device(chosen.device)
    keep_freed_memory()  # as `vit attention` does, which speeds up the reference as well
    machine = describe_conditions(device)
    results = {
        name: measure_model(name, device, rounds=chosen.rounds, micro_batch=chosen.micro_batch)
        for name in chosen.models
    }
    if chosen.output:
        result = {"machine": machine, "rounds": chosen.rounds, "models": results}
        print(f"\n{write_result(chosen.output, 'attention-maps', result)}")


if __name__ == "__main__":
    main()
