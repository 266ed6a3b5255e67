"""Seeds and generators per purpose; global random state is never used."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

_SEED_BYTES = 16


def derive_seed(seed: int, *what: str | int) -> int:
    """The seed for one purpose, named by `what`, of a run seeded with `seed`: in [0, 2^63).

    A keyed hash (BLAKE2b): purposes do not collide by concatenation ("a", "b" is not "ab", 1 is not "1"), and
    neighbouring run seeds give unrelated streams.
    """
    digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(_SEED_BYTES, "little", signed=True))
    for part in what:
        tag = b"i" if isinstance(part, int) else b"s"
        data = str(int(part) if isinstance(part, int) else part).encode()
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(seed: int, *what: str | int) -> numpy.random.Generator:
    """A separate counter-based generator (Philox) for one purpose."""
    import numpy

    return numpy.random.Generator(numpy.random.Philox(key=derive_seed(seed, *what)))


def permutation(n: int, seed: int, *what: str | int) -> list[int]:
    """A shuffled `range(n)` that depends on its arguments alone."""
    return [int(i) for i in generator(seed, *what).permutation(n)]


def prompt_order(n: int, seed: int, epoch: int) -> list[int]:
    """Order of `n` prompts in pass `epoch`; depends on (n, seed, epoch) alone."""
    return permutation(n, seed, "prompt-order", epoch)
