"""Devices and precisions by name."""

import pytest
import torch

from vit.runtime.device import choose_device, choose_precision, cpu_multiplies_bfloat16


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    for name in ("gpu", "mps"):
        with pytest.raises(ValueError, match=f"unknown device '{name}'; use auto, cpu, cuda"):
            choose_device(name)
    with pytest.raises(
        ValueError, match="unknown precision 'float16'; known: auto, bfloat16, float32"
    ):
        choose_precision("float16", torch.device("cpu"))


def test_auto_precision_is_what_the_processor_multiplies() -> None:
    expected = "bfloat16" if cpu_multiplies_bfloat16() else "float32"
    assert choose_precision("auto", torch.device("cpu")) == expected
    assert choose_precision("float32", torch.device("cpu")) == "float32"
