"""Rollout and gae never hold an N×N matrix: measured as the peak memory of a process of its own."""

import pytest

from tests.conftest import Launcher

SCRIPT = """
import resource, sys
import torch
from vit.explanation.methods.maps import compute_maps
from vit.model.vision_transformer import VisionTransformer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # bytes

method = sys.argv[1]
size, width, depth, heads = map(int, sys.argv[2:])
torch.set_num_threads(1)
model = VisionTransformer(
    img_size=size, patch_size=16, embed_dim=width, depth=depth, num_heads=heads,
    attention_backend="fused",
).eval()
with torch.no_grad():
    model.blocks[0](torch.randn(1, 16, width))  # what libraries set aside on first use
    before = peak()
    compute_maps(model, torch.randn(1, 3, size, size), methods=[method])
print(peak() - before)
"""


def measure_peak(cli: Launcher, method: str, *sizes: int) -> float:
    """Bytes that an explained forward pass takes above the model."""
    # glibc raises this threshold as it goes and then keeps holes in its heap: 330 to 500 MB instead
    # of 320, by luck
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    return float(cli.finish(cli.start(method, *sizes, program=("-c", SCRIPT), env=environment)).out)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("method", "sizes", "limit"),
    [
        # a third of the attention in float32: layers, heads, tokens²
        ("rollout", (768, 128, 4, 2), 4 * 4 * 2 * 2305**2 / 3),
        # that of one layer
        ("gae", (1024, 48, 2, 3), 4 * 3 * 4097**2),
        # a base model
        pytest.param("rollout", (1024, 768, 12, 12), 400e6, marks=pytest.mark.slow),
    ],
)
def test_a_large_image_takes_less_than_its_attention(
    cli: Launcher, method: str, sizes: tuple[int, ...], limit: float
) -> None:
    assert measure_peak(cli, method, *sizes) < limit
