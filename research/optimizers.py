"""Milliseconds of an optimizer step: this project's Muon beside torch's, on the same parameters and
gradients.

    python research/optimizers.py --output benchmarks/results

    ours          `vit.optim.muon.Muon`: one chain of batched products for the matrices of a shape (on a CPU up to 128
                  wide), the packed query-key-value matrix as three, AdamW for the rest
    torch         torch.optim.Muon, one matrix after the other (in bfloat16; the packed matrix as one), and fused
                  AdamW for the rest
    adamw         fused AdamW for everything: what Muon's steps cost more

Variants take turns round by round; a result is the median over the rounds. Gradients stay the same.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from conditions import describe_conditions, write_result
from torch import nn

from vit.model.vision_transformer import VisionTransformer
from vit.optim.optimizer import create_optimizer
from vit.runtime.device import choose_device

MODELS = {
    "CIFAR ViT, d128 L4": {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 128,
        "depth": 4,
        "num_heads": 2,
    },
    "CIFAR ViT, d192 L9": {
        "img_size": 32,
        "patch_size": 4,
        "embed_dim": 192,
        "depth": 9,
        "num_heads": 3,
    },
    "ViT-S/16": {"img_size": 224, "patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},
}


def build_variants(
    architecture: dict[str, int], device: torch.device
) -> dict[str, Callable[[], object]]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model = VisionTransformer(num_classes=10, **architecture).to(device)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return model

    model = build()
    matrices = [
        value
        for name, value in model.named_parameters()
        if name.startswith("blocks") and value.ndim == 2
    ]
    chosen = {id(value) for value in matrices}
    rest = [value for value in model.parameters() if id(value) not in chosen]
    muon = torch.optim.Muon(matrices, lr=0.02)
    adamw = torch.optim.AdamW(rest, lr=1e-3, fused=True)
    ours = create_optimizer(
        "muon", build(), lr=1e-3, weight_decay=0.05, muon_lr=0.02, muon_dtype=torch.bfloat16
    )
    alone = create_optimizer("adamw", build(), lr=1e-3, weight_decay=0.05)
    return {"ours": ours.step, "torch": lambda: (muon.step(), adamw.step()), "adamw": alone.step}


def measure(
    variants: dict[str, Callable[[], object]], device: torch.device, *, rounds: int
) -> dict[str, float]:
    """Milliseconds a step."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 2):
        for name, step in variants.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="folder for optimizers-<machine>.json")
    options = parser.parse_args()
    device = choose_device(options.device)
    machine = describe_conditions(device)
    milliseconds = {
        name: measure(build_variants(architecture, device), device, rounds=options.rounds)
        for name, architecture in MODELS.items()
    }
    for name, times in milliseconds.items():
        print(f"{name}: " + ", ".join(f"{variant} {value} ms" for variant, value in times.items()))
    if options.output:
        write_result(
            options.output, "optimizers", {"machine": machine, "milliseconds": milliseconds}
        )


if __name__ == "__main__":
    main()
