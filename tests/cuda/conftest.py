"""Tests that need a GPU; without one they are skipped.

VIT_TEST_DEVICE=cpu runs what a CPU can of them, so that on the day that there is a GPU only the
device is new: `VIT_TEST_DEVICE=cpu python -m pytest tests/cuda`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import save_noise

DEVICE = os.environ.get("VIT_TEST_DEVICE", "cuda")


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """What the tests run on."""
    if DEVICE.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    if DEVICE.startswith("cuda"):
        # a registered pretend device breaks every backward pass on CUDA tensors
        accelerator = str(torch.accelerator.current_accelerator())
        assert accelerator.startswith("cuda"), "run tests/cuda by itself"
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(DEVICE)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """A GPU, for what a CPU can't rehearse."""
    if device.type != "cuda":
        pytest.skip("only a GPU can show this")
    return device


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Without TF32, whose products have 10 bits of the mantissa."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    convolution = torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = convolution


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty-six pictures of three classes."""
    root = tmp_path_factory.mktemp("photos")
    names = [f"{name}/{number}.png" for name in ("ant", "bee", "cow") for number in range(12)]
    save_noise(root, names, size=(40, 48))
    return root
