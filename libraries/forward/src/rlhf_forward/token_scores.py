"""Log-probs of the tokens of finished sequences, with the most likely tokens at their positions.

They do not depend on an engine: the distribution is the model's own, at temperature 1 and without truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.batching import plan_micro_batches
from rlhf_core.errors import DivergenceError

from .logits import innermost, token_logits

_MAX_LOGITS = 2**27
"""Maximum number of logits of one forward pass. 0.5 GiB in float32."""
_SLICE = 256
"""Number of positions whose log-probs are computed at once, since these are float32 copies of the logits."""
_LEAST = -9999.0
"""Reported instead of a lower log-prob, since JSON does not have infinities."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A sequence of tokens, and the first one whose log-prob is needed."""

    token_ids: tuple[int, ...]
    first: int
    """Index in `token_ids`, at least 1, since the model does not predict the first token."""


class TokenScore(NamedTuple):
    """Log-prob of a token, and the most likely tokens at its position with their log-probs."""

    logprob: float
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of rows of the model's embedding. Token ids are below it.

    Args:
        model: A causal LM, possibly wrapped.
    """
    embedding: Any = innermost(model)
    return int(embedding.get_input_embeddings().weight.shape[0])


_Scores = list[TokenScore]


def score_rows(
    model: nn.Module,
    rows: Sequence[ScoredRow],
    num_top: int,
    run: Callable[[Callable[[], _Scores]], _Scores] = lambda work: work(),
) -> list[_Scores]:
    """Return the scores of each row's tokens from its first one on.

    Args:
        model: A causal LM, possibly wrapped.
        rows: The sequences.
        num_top: Number of most likely tokens at each position.
        run: Calls each forward pass, with a part of the rows.

    Raises:
        DivergenceError: The logits are not finite.
    """
    limit = max(1, _MAX_LOGITS // vocabulary_size(model))
    parts = [(index, part) for index, row in enumerate(rows) for part in _parts(row, limit)]
    scores: list[_Scores] = [[] for _ in parts]
    for batch in plan_micro_batches([len(part.token_ids) for _, part in parts], limit):
        some = [parts[each][1] for each in batch]
        found = iter(run(partial(_score, model, some, num_top)))
        for each, part in zip(batch, some, strict=True):
            scores[each] = [next(found) for _ in part.token_ids[part.first :]]
    of_rows: list[_Scores] = [[] for _ in rows]
    for (index, _), of_part in zip(parts, scores, strict=True):
        of_rows[index] += of_part
    return of_rows


def _parts(row: ScoredRow, limit: int) -> Iterator[ScoredRow]:
    """Prefixes of a row, each with at most `limit` needed tokens. Tokens do not depend on later ones."""
    for first in range(row.first, len(row.token_ids), limit):
        yield ScoredRow(row.token_ids[: first + limit], first)


@torch.no_grad()
def _score(model: nn.Module, rows: Sequence[ScoredRow], num_top: int) -> _Scores:
    """Return the scores of all needed tokens of the rows, by row."""
    device = next(model.parameters()).device
    longest = max(len(row.token_ids) for row in rows)
    ids = torch.tensor([[*row.token_ids, *([0] * (longest - len(row.token_ids)))] for row in rows], device=device)
    columns = torch.arange(longest, device=device)
    ends = torch.tensor([[len(row.token_ids)] for row in rows], device=device)
    firsts = torch.tensor([[row.first] for row in rows], device=device)
    logits = token_logits(model, ids, columns < ends, (columns >= firsts - 1) & (columns < ends - 1))
    labels = torch.tensor([token for row in rows for token in row.token_ids[row.first :]], device=device)
    slices = zip(logits.split(_SLICE), labels.split(_SLICE), strict=True)
    return [score for some, chosen in slices for score in _scores_of(some, chosen, num_top)]


def _scores_of(logits: Tensor, labels: Tensor, num_top: int) -> Iterator[TokenScore]:
    """Scores of `labels` [N], from logits [N, V]."""
    log_probs = logits.float().log_softmax(-1).clamp(min=_LEAST)
    if bool(log_probs.isnan().any()):
        raise DivergenceError("the model's logits are not finite", where="log-probs", hint="use other weights")
    chosen = log_probs.gather(-1, labels[:, None])[:, 0].tolist()
    top = log_probs.topk(min(num_top, log_probs.shape[-1]))
    yield from map(TokenScore, chosen, top.indices.tolist(), top.values.tolist())
