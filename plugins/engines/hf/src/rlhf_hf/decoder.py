"""Sampler and stop rule of a row. Rows that are decoded together may have different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .rows import Row, StopRule
from .sampler import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """Shared by all rows with the same sampling parameters."""

    sampler: Sampler
    stop: StopRule


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Row]:
    """Append one token to each row, and return those that end with it. `logits` [n, V].

    Raises `DivergenceError` when the logits are not finite.
    """
    decoders = {id(row.decoder): row.decoder for row in rows}
    for decoder in decoders.values():
        if len(decoders) == 1:
            decoder.sampler.draw(logits, rows)
            break
        places = [place for place, row in enumerate(rows) if row.decoder is decoder]
        decoder.sampler.draw(logits[torch.tensor(places, device=logits.device)], [rows[place] for place in places])
    finished = []
    for row in rows:
        row.finish_reason = row.decoder.stop.reason(row)
        if row.finish_reason is not None:
            finished.append(row)
    return finished
