"""Scores of a transformers sequence classifier at chosen tokens of rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .masking import mask_from_lengths
from .row_lengths import own_lengths


def last_token_scores(model: Any, rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Compute the scores of a transformers classifier at the last token of each row.

    The last token is known from the lengths. transformers' pooling uses the last token other than the pad token, and so
    misses an EOS that is also the pad token.

    Args:
        model: A sequence classifier with a head `score`.
        rows: B tensors of int64 token ids, without padding.
        device: The model's device.

    Returns:
        [B, labels] float32.
    """
    return scores_at(model, rows, [[len(row) - 1] for row in rows], device)


def scores_at(model: Any, rows: Sequence[Tensor], places: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Compute the scores of a transformers classifier at several tokens of each row.

    Args:
        model, rows, device: As for `last_token_scores`.
        places: Per row, the indices of the tokens.

    Returns:
        [N, labels] float32, row by row.
    """
    lengths = torch.tensor([len(row) for row in rows], device=device)
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)
    mask = mask_from_lengths(lengths, ids.shape[1]).long()
    trunk = model.base_model
    options = {"use_cache": False} if "use_cache" in inspect.signature(trunk.forward).parameters else {}
    with own_lengths(trunk, lengths[:, None]):
        hidden = trunk(input_ids=ids, attention_mask=mask, **options).last_hidden_state
    index = torch.tensor([(row, place) for row, of_row in enumerate(places) for place in of_row], device=device)
    scores: Tensor = model.score(hidden[index[:, 0], index[:, 1]])
    return scores.float()
