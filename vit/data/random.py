"""Stateless random numbers: a hash of (seed, epoch, sample id, stream).

The same bits on CPU and CUDA, in any order, in any process, for any number of workers. Integers are hashed
with the finaliser of splitmix64 (Steele, Lea & Flood 2014), in the wrapping int64 arithmetic of torch.
"""

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

SampleIds = Int64[Tensor, " B"]  # each sample's index in its dataset, on the host

# splitmix64's constants as the int64 of the same bits
_GOLDEN, _FIRST, _SECOND = (bits - (1 << 64) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(value: Int64[Tensor, " n"], bits: int) -> Int64[Tensor, " n"]:
    """Logical shift: torch's own copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class StatelessRandom:
    """The random numbers of one epoch of one run."""

    seed: int
    epoch: int

    def bits(self, stream: str, sample_ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """64 random bits a sample: splitmix64 of hash(seed, epoch, stream) + (id + 1) · golden ratio, one to one."""
        name = f"{self.seed}/{self.epoch}/{stream}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
        mixed = (sample_ids + 1) * _GOLDEN + key
        mixed = (mixed ^ _shift_right(mixed, 30)) * _FIRST
        mixed = (mixed ^ _shift_right(mixed, 27)) * _SECOND
        return mixed ^ _shift_right(mixed, 31)

    def uniform(self, stream: str, sample_ids: Int64[Tensor, " n"]) -> Float32[Tensor, " n"]:
        """In [0, 1), multiples of 2⁻²⁴: exact in float32."""
        return _shift_right(self.bits(stream, sample_ids), 40).float() * 2.0**-24

    def integers(self, stream: str, sample_ids: Int64[Tensor, " n"], *, below: int) -> Int64[Tensor, " n"]:
        """In 0 … below - 1; `below` < 2³¹ (its bias is below / 2³²)."""
        return _shift_right(_shift_right(self.bits(stream, sample_ids), 32) * below, 32)

    def permutation(self, n: int) -> Int64[Tensor, " n"]:
        """An order of 0 … n - 1: the hash has no ties, so sorting by it is well defined."""
        return torch.argsort(self.bits("order", torch.arange(n)))


def seed_generators(value: int) -> None:
    """Make what torch, numpy and random draw from here on a function of `value`, below 2³²."""
    torch.manual_seed(value)
    np.random.seed(value)  # noqa: NPY002 (a layer or transform of the user's may use it)
    random.seed(value)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make every generator's numbers in one step a function of (seed, step, rank), so that none needs saving."""
    seed_generators(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))
