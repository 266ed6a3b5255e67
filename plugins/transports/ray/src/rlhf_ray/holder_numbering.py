"""Sample ids of an experience maker: by maker, step and row."""

from __future__ import annotations

from hashlib import blake2b

from rlhf_core.errors import DataError

_MAKER_BITS, _STEP_BITS, _ROW_BITS = 22, 24, 16
"""62 in all: sample ids are int64, and those from 1 << 62 belong to evaluation."""


def maker_number(name: str) -> int:
    """A number for a maker's name, the same in every run."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % (1 << _MAKER_BITS)


def sample_id(maker: int, step: int, row: int) -> int:
    """Unique number of a sample: row `row` of a maker's batch `step`, both from 0."""
    if row >= 1 << _ROW_BITS or step >= 1 << _STEP_BITS:
        raise DataError(f"row {row} of batch {step} cannot be numbered", where="data loader", hint="smaller batches")
    return (maker << _STEP_BITS | step) << _ROW_BITS | row
