"""Stateless random numbers: a hash of (seed, epoch, sample id, stream).

The same bits on CPU and CUDA, in any order, in any process, for any number of workers. Integers are hashed
with the finaliser of splitmix64 (Steele, Lea & Flood 2014), in the wrapping int64 arithmetic of torch.
"""

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 that holds the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(value: Int64[Tensor, " n"], bits: int) -> Int64[Tensor, " n"]:
    """Logical shift: torch's own copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _hash(values: Int64[Tensor, " n"], key: int) -> Int64[Tensor, " n"]:
    """splitmix64's output for the states key + (value + 1) * golden ratio: a bijection of the values."""
    mixed = (values + 1) * _signed(_GOLDEN) + _signed(key)
    mixed = (mixed ^ _shift_right(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(_SECOND)
    return mixed ^ _shift_right(mixed, 31)


@dataclass(frozen=True)
class StatelessRandom:
    """The random numbers of one epoch of one run."""

    seed: int
    epoch: int

    def key(self, stream: str) -> int:
        """64 bits that stand for (seed, epoch, stream)."""
        name = f"{self.seed}/{self.epoch}/{stream}".encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")

    def bits(self, stream: str, sample_ids: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """64 random bits for each sample."""
        return _hash(sample_ids, self.key(stream))

    def uniform(self, stream: str, sample_ids: Int64[Tensor, " n"]) -> Float32[Tensor, " n"]:
        """In [0, 1), multiples of 2⁻²⁴: exact in float32."""
        return _shift_right(self.bits(stream, sample_ids), 40).float() * 2.0**-24

    def integers(self, stream: str, sample_ids: Int64[Tensor, " n"], *, below: int) -> Int64[Tensor, " n"]:
        """In 0 … below - 1; `below` < 2³¹ (its bias is below / 2³²)."""
        return _shift_right(_shift_right(self.bits(stream, sample_ids), 32) * below, 32)

    def permutation(self, n: int) -> Int64[Tensor, " n"]:
        """An order of 0 … n - 1: the hash has no ties, so sorting by it is well defined."""
        return torch.argsort(self.bits("order", torch.arange(n)))
