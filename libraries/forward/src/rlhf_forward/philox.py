"""Philox4x32-10 (Salmon 2011, "Parallel random numbers: as easy as 1, 2, 3"): random bits from a counter and a key."""

from __future__ import annotations

from torch import Tensor

WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit words, in int64 without overflow (using 16-bit halves)."""
    low = word * (factor & 0xFFFF)
    high = word * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Map four 32-bit words to four 32-bit words. int64 tensors that broadcast, with values in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & WORD, (k1 + _KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3
