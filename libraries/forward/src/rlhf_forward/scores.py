"""Scores that a transformers sequence classifier gives to tokens of rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .masking import mask_from_lengths
from .row_lengths import own_lengths


def last_token_scores(model: Any, rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """[B, labels] float32: the head `score` of a transformers classifier at each row's last token.

    rows: [B] of int64 token ids, without padding. The last token is found from the lengths: transformers' pooling
    takes the last token that is not the pad token, and so misses an EOS that is also the pad token.
    """
    return scores_at(model, rows, [[len(row) - 1] for row in rows], device)


def scores_at(model: Any, rows: Sequence[Tensor], places: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[N, labels] float32: the head `score` at these N tokens of the rows, row by row; see `last_token_scores`."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)
    mask = mask_from_lengths(lengths, ids.shape[1]).long()
    trunk = model.base_model
    options = {"use_cache": False} if "use_cache" in inspect.signature(trunk.forward).parameters else {}
    with own_lengths(trunk, lengths[:, None]):
        hidden = trunk(input_ids=ids, attention_mask=mask, **options).last_hidden_state
    read = torch.tensor([(row, place) for row, of_row in enumerate(places) for place in of_row], device=device)
    scores: Tensor = model.score(hidden[read[:, 0], read[:, 1]])
    return scores.float()
