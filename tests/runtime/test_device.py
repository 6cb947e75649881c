"""Devices and precisions by name."""

from functools import lru_cache
from typing import Any

import pytest
import torch

from vit.runtime.device import (
    choose_device,
    choose_precision,
    copy_to_device,
    count_bytes,
    free_cached_memory,
)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    for name in ("gpu", "mps:1", "mps", "cpu:1", "cuda:x", ""):
        with pytest.raises(
            ValueError, match=f"no device '{name}' here; use auto, cpu, cuda, cuda:N"
        ):
            choose_device(name)
    with pytest.raises(ValueError, match="unknown precision 'float8'; known: auto, bfloat16"):
        choose_precision("float8", torch.device("cpu"))


class Cards:
    """The cards that torch reports, and the settings that it gets."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], kernels: str
    ) -> None:
        self.current = 0
        self.uses_cudnn = True
        self.asked_about: list[int] = []
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: len(capabilities),
            "current_device": lambda: self.current,
            "set_device": self.set_device,
            "device": self.select,
            "get_device_capability": lambda device: capabilities[device.index],
            "get_device_name": lambda device: f"card {device.index}",
            "get_arch_list": kernels.split,
            "is_bf16_supported": lambda including_emulation: capabilities[self.current] >= (8, 0),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def set_device(self, device: torch.device) -> None:
        self.current = device.index

    def set_cudnn(self, enabled: bool) -> None:
        self.uses_cudnn = enabled

    def select(self, device: torch.device) -> "Cards":
        self.selected = device.index
        return self

    def __enter__(self) -> None:
        self.before = self.current
        self.current = self.selected

    def __exit__(self, *_: object) -> None:
        self.current = self.before


def test_a_card_becomes_the_current_one_and_is_asked_for_its_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A T4 beside an A100 and a P100."""
    cards = Cards(monkeypatch, [(7, 5), (8, 0), (6, 0)], "sm_60 sm_75 sm_80 sm_90")
    assert choose_precision("auto", torch.device("cuda", 1)) == "bfloat16"
    assert choose_precision("auto", torch.device("cuda", 0)) == "float16"
    assert choose_precision("auto", torch.device("cuda", 2)) == "float32"
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cards.set_cudnn)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert cards.current == 1
    # its backward pass is NaN on some cards
    assert not cards.uses_cudnn
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device("auto").type == "cuda"
    with pytest.raises(ValueError, match="torch finds no device 'cuda:3' here"):
        choose_device("cuda:3")


def test_a_gpu_of_apple_is_taken_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a CPU can show it: its memory is asked for by the names that torch has for it."""
    # torch's compiler reads what the original is wrapped around
    monkeypatch.setattr(torch.backends.mps, "is_available", lru_cache(lambda: True))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 300)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    mps = choose_device("mps")
    assert mps == torch.device("mps")
    assert choose_precision("auto", mps) == "float32"
    assert count_bytes(mps) == (700, 1000)
    free_cached_memory(mps)
    copied: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: copied.append(device) or tensor)
    values = (torch.zeros(3), [torch.ones(2)])
    assert copy_to_device(values, mps) == values
    assert copied == [mps, mps]
