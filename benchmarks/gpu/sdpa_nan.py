"""Tell which kernels of attention have gradients that are not finite or wrong.

    python benchmarks/gpu/sdpa_nan.py --output benchmarks/results      # 15 s on a GPU

Each length is tried with scores far below 0, where cuDNN's backward pass has been NaN, and with the strides of the
packed projection. "cudnn, keys centred" is what our models compute.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from conditions import describe_conditions, write_result
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit.model.attention import centre_keys

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
LENGTHS = (16, 36, 49, 63, 64, 65, 128, 192, 196, 197, 256, 257, 320)
SHIFTS = (0, -80, -95, -120)
# A larger part of a gradient's norm is called wrong.
TOLERANCE = 0.05


def draw(length: int, shift: int, *, packed: bool, device: str) -> list[Tensor]:
    """Draw queries, keys and values; all scores of the first half of the images are `shift`."""
    generator = torch.Generator().manual_seed(length)
    count, heads, width = (64 if device == "cuda" else 2), 6, 64
    values = 0.1 * torch.randn(count, length, 3, heads, width, generator=generator)
    values[:, :, 2] *= 10
    if shift:
        values[: count // 2, :, 0, :, 0] = 1.0
        values[: count // 2, :, 1, :, 0] = shift * width**0.5
    parts = values.to(device, torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)
    if not packed:
        parts = tuple(part.contiguous() for part in parts)
    return [part.detach().requires_grad_() for part in parts]


def differentiate(
    attend: Callable[..., Tensor], kernel: SDPBackend, inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    """Return the output and the gradients of queries, keys and values."""
    with sdpa_kernel(kernel):
        output = attend(*inputs)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        return output.detach(), *torch.autograd.grad(output, inputs, direction.to(output))


def find_fault(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, shift: int) -> str:
    """Say what is wrong, or return an empty text. With a shift, gradients of its channel cancel."""
    if not all(bool(tensor.isfinite().all()) for tensor in found):
        return "not finite"
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6))
        for a, b in zip(found, expected, strict=True)
    ]
    return "" if shift or max(errors) < TOLERANCE else f"wrong by {max(errors):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="folder of the result")
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    attend = F.scaled_dot_product_attention
    names = list(KERNELS) if is_cuda else ["flash", "math"]
    ways = {name: (attend, KERNELS[name]) for name in names}
    ways[f"{names[0]}, keys centred"] = (
        lambda query, key, value: attend(query, centre_keys(key), value),
        KERNELS[names[0]],
    )
    lengths = LENGTHS if is_cuda else (36, 64)
    failures = []
    for length, shift, packed in itertools.product(lengths, SHIFTS, (True, False)):
        inputs = draw(length, shift, packed=packed, device=options.device)
        expected = differentiate(attend, SDPBackend.MATH, inputs)
        for name, (way, kernel) in ways.items():
            try:
                fault = find_fault(differentiate(way, kernel, inputs), expected, shift=shift)
            except RuntimeError:  # the kernel doesn't take these
                continue
            if fault:
                case = {"length": length, "shift": shift, "packed": packed}
                failures.append({**case, "kernel": name, "fault": fault})
    result = {"machine": describe_conditions(options.device), "kernels": list(ways)}
    print(write_result(options.output, "attention-nan", {**result, "failures": failures}))


if __name__ == "__main__":
    main()
