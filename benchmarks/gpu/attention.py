"""Milliseconds of attention, forward and backward, by kernel, at the lengths of our recipes and of a
ViT-B; what cuDNN's would gain with centred keys.

    python benchmarks/gpu/attention.py --output FILE       # 25 s on a GPU
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit.model.attention import centre_keys
from vit.model.cpu_kernels import ExplicitAttention

# batch, tokens, heads; each head has 64 channels
CASES = {
    "speedrun, 24 px": (1000, 36, 6),
    "speedrun, 32 px": (1000, 64, 6),
    "144 tokens": (1024, 144, 6),
    "256 tokens": (1024, 256, 6),
    "ViT-B, 224 px": (128, 197, 12),
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_explicitly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query * query.shape[-1] ** -0.5) @ key.mT).softmax(-1) @ value


def attend_to_centred_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, centre_keys(key), value)


def by(kernel: SDPBackend, attend: Attend = F.scaled_dot_product_attention) -> Attend:
    def run(*parts: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return attend(*parts)

    return run


def list_ways(*, is_cuda: bool) -> dict[str, Attend]:
    ways: dict[str, Attend] = {"math": by(SDPBackend.MATH), "by hand": _attend_by_hand}
    if not is_cuda:
        return ways | {"flash": by(SDPBackend.FLASH_ATTENTION)}
    centred = torch.compile(attend_to_centred_keys, dynamic=False)
    return ways | {
        "explicit, compiled": torch.compile(attend_explicitly, dynamic=False),
        "cudnn": by(SDPBackend.CUDNN_ATTENTION),
        "flash": by(SDPBackend.FLASH_ATTENTION),
        "efficient": by(SDPBackend.EFFICIENT_ATTENTION),
        "cudnn, keys centred, compiled": by(SDPBackend.CUDNN_ATTENTION, centred),
        "flash, keys centred, compiled": by(SDPBackend.FLASH_ATTENTION, centred),
    }


def _attend_by_hand(*parts: Tensor) -> Tensor:
    output: Tensor = ExplicitAttention.apply(*parts)[0]
    return output


def differentiate(attend: Attend, packed: Tensor, direction: Tensor) -> None:
    """A forward and backward pass with the packed projection and merged heads of our layer."""
    context = attend(*packed.permute(2, 0, 3, 1, 4).unbind(0))
    torch.autograd.grad(context.transpose(1, 2).flatten(2), packed, direction)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, help="instead of each case's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    is_cuda = options.device == "cuda"

    def wait() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    results: dict[str, dict[str, Any]] = {}
    for case, (batch, tokens, heads) in CASES.items():
        batch = options.batch_size or batch
        like = {"device": options.device, "dtype": torch.bfloat16}
        packed = torch.randn(batch, tokens, 3, heads, 64, requires_grad=True, **like)
        direction = torch.randn(batch, tokens, heads * 64, **like)
        results[case] = {}
        for name, attend in list_ways(is_cuda=is_cuda).items():
            try:
                for _ in range(3):
                    differentiate(attend, packed, direction)
                wait()
                start = time.perf_counter()
                for _ in range(options.steps):
                    differentiate(attend, packed, direction)
                wait()
            except RuntimeError as error:
                results[case][name] = str(error).splitlines()[0]
                continue
            results[case][name] = 1e3 * (time.perf_counter() - start) / options.steps
        print(case, results[case], flush=True)
        if options.output:
            options.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
