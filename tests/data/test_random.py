"""StatelessRandom are the stated hash, uniform, and independent of each other."""

import hashlib
import random

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from vit.data.random import StatelessRandom, seed_step

MASK = (1 << 64) - 1
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def splitmix64(seed: int, epoch: int, stream: str, sample: int) -> int:
    """The published algorithm in Python's unbounded integers."""
    name = f"{seed}/{epoch}/{stream}".encode()
    state = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    z = (state + (sample + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def chi_square_p(counts: torch.Tensor) -> float:
    """Probability of a spread this large or larger if all cells are equally likely."""
    expected = counts.sum() / counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float(chi2.sf(statistic, counts.numel() - 1))


@pytest.mark.parametrize("device", DEVICES)
def test_bits_equal_the_published_algorithm(device: str) -> None:
    ids = torch.tensor([0, 1, 2, 49_999, 2**40 + 3], device=device)
    got = StatelessRandom(3, 5, ids).bits("flip").tolist()
    assert [value & MASK for value in got] == [
        splitmix64(3, 5, "flip", sample) for sample in ids.tolist()
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_uniforms_and_integers_are_the_upper_bits_exactly(device: str) -> None:
    ids = torch.arange(1000, device=device)
    words = [splitmix64(0, 1, "x", sample) for sample in range(1000)]
    assert StatelessRandom(0, 1, ids).uniform("x").tolist() == [
        (word >> 40) / 2**24 for word in words
    ]
    assert StatelessRandom(0, 1, ids).integers("x", below=9).tolist() == [
        (word >> 32) * 9 >> 32 for word in words
    ]


def test_random_numbers_never_change_between_versions() -> None:
    # a resumed run must see the pictures it would have seen
    rng = StatelessRandom(0, 0, torch.arange(8))
    assert rng.integers("crop y", below=9).tolist() == [5, 2, 4, 5, 5, 4, 2, 4]
    assert rng.permutation().tolist() == [6, 2, 0, 4, 5, 1, 7, 3]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 0, "x", 0), (0, 1, "x", 0)),  # epochs
        ((0, 0, "crop y", 0), (0, 0, "crop x", 0)),  # streams
        ((0, 0, "x", 0), (0, 0, "x", 1)),  # neighbouring samples
    ],
)
def test_random_numbers_that_differ_in_one_thing_are_independent(
    first: tuple[int, int, str, int], second: tuple[int, int, str, int]
) -> None:
    left, right = (
        StatelessRandom(seed, epoch, torch.arange(100_000) + shift).integers(stream, below=8)
        for seed, epoch, stream, shift in (first, second)
    )
    table = torch.bincount(left * 8 + right, minlength=64).double()
    assert chi_square_p(table) > 1e-3


def test_each_process_and_step_has_numbers_of_its_own() -> None:
    def draw(*step: int) -> tuple[float, ...]:
        seed_step(*step)
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002

    assert draw(0, 5, 0) == draw(0, 5, 0)
    others = [draw(0, 5, 0), draw(1, 5, 0), draw(0, 6, 0), draw(0, 5, 1)]
    assert all(len(set(numbers)) == 4 for numbers in zip(*others, strict=True))
