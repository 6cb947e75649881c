"""Which kernels of attention have gradients that are not finite or wrong, by length, with and
without scores far below 0.

    python benchmarks/gpu/sdpa_nan.py --output FILE        # 15 s on a GPU

No mask, queries, keys and values with the strides of the packed projection or contiguous.
"cudnn, keys centred" is what our models compute.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
# of a gradient's norm, beyond which it is called wrong
TOLERANCE = 0.05


def attend_to_centred_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, centre_keys(key), value)


def draw(length: int, shift: int, *, packed: bool, device: str) -> list[Tensor]:
    """The same numbers for every kernel. All scores of the first half of the images are `shift`."""
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
    with sdpa_kernel(kernel):
        output = attend(*inputs)
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        return output.detach(), *torch.autograd.grad(output, inputs, direction.to(output))


def judge(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, shifted: bool) -> str:
    bad = [int((~tensor.isfinite()).sum()) for tensor in found]
    if any(bad):
        return "not finite (output, q, k, v): " + ", ".join(map(str, bad))
    # with a shift, gradients of its channel cancel
    if shifted:
        return "ok"
    errors = [
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6))
        for a, b in zip(found, expected, strict=True)
    ]
    return "ok" if max(errors) < TOLERANCE else f"wrong by {max(errors):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    ways: dict[str, tuple[Callable[..., Tensor], SDPBackend]] = {
        name: (F.scaled_dot_product_attention, kernel)
        for name, kernel in KERNELS.items()
        if is_cuda or name in ("flash", "math")
    }
    first = "cudnn" if is_cuda else "flash"
    ways[f"{first}, keys centred"] = (attend_to_centred_keys, KERNELS[first])
    lengths = LENGTHS if is_cuda else (36, 64)
    failures: list[dict[str, Any]] = []
    for length, shift, packed in itertools.product(lengths, SHIFTS, (True, False)):
        place = {"length": length, "shift": shift, "packed": packed}
        inputs = draw(length, shift, packed=packed, device=options.device)
        expected = differentiate(F.scaled_dot_product_attention, SDPBackend.MATH, inputs)
        for name, (attend, kernel) in ways.items():
            try:
                found = differentiate(attend, kernel, inputs)
            except RuntimeError:  # the kernel doesn't take these
                continue
            verdict = judge(found, expected, shifted=bool(shift))
            if verdict != "ok":
                failures.append({**place, "kernel": name, "verdict": verdict})
                print(failures[-1], flush=True)
    result = {"kernels": list(ways), "lengths": lengths, "failures": failures}
    failing = sorted({failure["kernel"] for failure in failures})
    print(f"kernels with failures: {', '.join(failing) or 'none'}")
    if options.output:
        options.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
