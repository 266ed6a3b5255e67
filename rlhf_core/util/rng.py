"""Seeds and generators per purpose. Global random state is never used."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy

_SEED_BYTES = 16


def derive_seed(seed: int, *what: str | int) -> int:
    """Return the seed for one purpose of a run, in [0, 2^63).

    A keyed hash (BLAKE2b). Purposes do not collide by concatenation ("a", "b" is not "ab", 1 is not "1"), and adjacent
    run seeds give unrelated streams.

    Args:
        seed: seed of the run.
        what: name of the purpose, in one or several parts.

    Example:
        >>> derive_seed(0, "dropout", 1) == derive_seed(0, "dropout", 1) != derive_seed(0, "dropout", 2)
        True
    """
    digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(_SEED_BYTES, "little", signed=True))
    for part in what:
        tag = b"i" if isinstance(part, int) else b"s"
        data = str(int(part) if isinstance(part, int) else part).encode()
        digest.update(tag + len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(seed: int, *what: str | int) -> numpy.random.Generator:
    """Return a separate counter-based generator (Philox) for one purpose."""
    import numpy

    return numpy.random.Generator(numpy.random.Philox(key=derive_seed(seed, *what)))


def permutation(n: int, seed: int, *what: str | int) -> list[int]:
    """Return a shuffled `range(n)` that depends only on the arguments.

    Args:
        n: number of indices.
        seed: seed of the run.
        what: name of the purpose, in one or several parts.

    Example:
        >>> permutation(5, 0, "documents")
        [0, 4, 1, 3, 2]
    """
    return [int(i) for i in generator(seed, *what).permutation(n)]


def prompt_order(n: int, seed: int, epoch: int) -> list[int]:
    """Return the order of `n` prompts in pass `epoch`. It depends only on (n, seed, epoch)."""
    return permutation(n, seed, "prompt-order", epoch)
