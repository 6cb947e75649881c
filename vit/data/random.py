"""Stateless random numbers: a hash of (seed, epoch, sample id, stream).

The same bits on CPU and CUDA, in any order, in any process, for any number of workers. Integers are
hashed with the finaliser of splitmix64 (Steele, Lea & Flood 2014), in the wrapping int64 arithmetic
of torch.
"""

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

# each sample's index in its dataset, on the host
SampleIds = Int64[Tensor, " n"]

# splitmix64's constants as the int64 of the same bits
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, eq=False)
class StatelessRandom:
    """The random numbers of samples in one epoch of one run. A `stream` names what they are for:
    those of two streams are independent."""

    seed: int
    epoch: int
    sample_ids: SampleIds

    def bits(self, stream: str) -> Int64[Tensor, " n"]:
        """Draw 64 random bits: splitmix64 of hash(seed, epoch, stream) + (id + 1) · golden ratio.
        Different ids have different bits."""
        name = f"{self.seed}/{self.epoch}/{stream}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
        mixed = (self.sample_ids + 1) * _GOLDEN_RATIO + key
        mixed = (mixed ^ _shift_right(mixed, 30)) * _MULTIPLIER_1
        mixed = (mixed ^ _shift_right(mixed, 27)) * _MULTIPLIER_2
        return mixed ^ _shift_right(mixed, 31)

    def uniform(self, stream: str) -> Float32[Tensor, " n"]:
        """Draw numbers in [0, 1), multiples of 2⁻²⁴: exact in float32."""
        return _shift_right(self.bits(stream), 40).float() * 2.0**-24

    def integers(self, stream: str, *, below: int) -> Int64[Tensor, " n"]:
        """Draw integers in 0 … below - 1; `below` < 2³¹ (their bias is below / 2³²)."""
        return _shift_right(_shift_right(self.bits(stream), 32) * below, 32)

    def permutation(self) -> SampleIds:
        """Return the samples in a random order. The hash has no ties, so the order is unique."""
        return self.sample_ids[torch.argsort(self.bits("order"))]


def _shift_right(value: Int64[Tensor, " n"], num_bits: int) -> Int64[Tensor, " n"]:
    """Shift without copying the sign, unlike torch's operator."""
    return (value >> num_bits) & ((1 << (64 - num_bits)) - 1)


def seed_generators(seed: int) -> None:
    """Seed the generators of torch, numpy and random; `seed` is below 2³²."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (a layer or transform of the user's may use it)
    random.seed(seed)


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed every generator by (seed, step, rank), so that no generator's state needs saving."""
    sequence = np.random.SeedSequence((seed, step, rank))
    seed_generators(int(sequence.generate_state(1)[0]))
