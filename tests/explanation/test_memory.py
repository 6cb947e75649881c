"""Rollout never holds an N×N matrix: measured as the peak memory of a process of its own."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from vit.explanation.methods.table import compute_maps
from vit.model.vision_transformer import VisionTransformer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB

size, width, depth, heads = map(int, sys.argv[1:])
torch.set_num_threads(1)
model = VisionTransformer(img_size=size, patch_size=16, embed_dim=width, depth=depth, num_heads=heads).eval()
with torch.no_grad():
    model.blocks[0](torch.randn(1, 16, width))  # what libraries set aside on first use
    before = peak()
    compute_maps(model, torch.randn(1, 3, size, size), methods=["rollout"])
print(peak() - before)
"""


def measure_peak(*sizes: int) -> float:
    """MiB that an explained forward pass takes above the model."""
    arguments = [sys.executable, "-c", SCRIPT, *map(str, sizes)]
    # glibc raises this threshold as it goes and then keeps holes in its heap: 330 to 500 MB instead of 320, by luck
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout)


def test_a_large_image_takes_less_than_its_attention() -> None:
    attention = 4 * 4 * 2 * 2305**2 / 2**20  # float32, layers, heads, tokens²: 324 MiB
    assert measure_peak(768, 128, 4, 2) < attention / 3


@pytest.mark.slow
def test_a_base_model_at_1024_pixels_takes_less_than_400_mb() -> None:
    assert measure_peak(1024, 768, 12, 12) * 2**20 < 400e6
