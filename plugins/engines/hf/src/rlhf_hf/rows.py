"""Decoding rows, one per answer, and the sampling of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from rlhf_core.errors import DivergenceError
from rlhf_core.types import Completion, FinishReason, GenerationRequest, SamplingParams
from rlhf_forward import (
    BannedWords,
    SampledTokens,
    Vocabulary,
    greedy_sample,
    inverse_cdf_sample,
    sampled_columns,
    structure_columns,
    temperature_of,
    uniforms,
)
from rlhf_models import answer_limit

from .row_shaping import RowShaping, shaped_rows
from .row_structure import RowStructure, structured_logits
from .stop import StopRule

NOISE_TOKENS = 256
"""Number of tokens for which a row draws noise at once. Many cost hardly more than one."""


@dataclass(slots=True, eq=False)
class DecodingRow:
    """A request and the tokens sampled for it so far."""

    request: GenerationRequest
    limit: int
    """Maximum number of tokens to sample, at least 1."""
    prompt_key: int
    """Equal for rows of one `make_rows` call if and only if their prompts are equal."""
    temperature: float | None = None
    """Temperature of this request, None to use that of the sampling parameters."""
    shaping: RowShaping | None = None
    """Penalties, min-p and banned tokens. None if all are off."""
    structured: RowStructure | None = None
    """Structure of the answer. None if it is free."""
    sampler: TokenSampler = field(init=False)
    """Sampler for this row, set by `RunningBatch.add`."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support_ids: list[Sequence[int]] = field(default_factory=list)
    """Per token, the ids that it was sampled from. Empty without truncation."""
    noise: list[float] = field(default_factory=list)
    """Uniform random numbers for its first tokens, drawn in blocks."""
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    """Number of prompt tokens computed for this row, not reused."""
    version: int = field(init=False)
    """Policy version for its next token."""
    versions: list[int] = field(default_factory=list)
    """Policy version of each sampled token."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids

    @property
    def num_cached(self) -> int:
        """Number of tokens whose keys and values are cached: all except the last sampled one."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        columns: dict[str, Any] = {}
        if self.structured is not None and not self.sampler.is_greedy:
            ends = self.sampler.stop.eos_ids
            columns = structure_columns(self.structured.structure, ends, len(self.token_ids))
        if self.temperature is not None or self.shaping is not None:
            banned = None if self.shaping is None else self.shaping.banned
            columns |= sampled_columns(self.request.options, banned, self.token_ids, where="engine hf")
        return Completion(
            sample_id=self.request.sample_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            policy_version=min(self.versions),
            policy_versions=tuple(self.versions) if len(set(self.versions)) > 1 else (),
            support_ids=tuple(self.support_ids) if self.support_ids else None,
            branch=self.request.branch,
            num_reused=len(self.prompt_ids) - self.num_computed,
            columns=columns,
        )

    @property
    def prefix(self) -> tuple[int, ...] | None:
        """Tokens whose keys and values the next turn can reuse, None if it is the last turn or weights changed."""
        if not self.request.goes_on or any(each != self.version for each in self.versions):
            return None
        return (*self.request.prompt_ids, *self.token_ids[:-1])


def make_rows(
    requests: Sequence[GenerationRequest],
    sampling: SamplingParams,
    context_tokens: int | None,
    first_key: int = 0,
    banned: BannedWords | None = None,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> list[DecodingRow]:
    """Create rows in the order of the requests, each with its token limit.

    `context_tokens` is the model's maximum sequence length, None if unbounded. Prompt keys start at `first_key`.
    Raises `DataError` for a prompt that is empty or leaves no room for one token, and for an invalid option.
    """
    rows = []
    keys: dict[tuple[int, ...], int] = {}
    for request in requests:
        limit = answer_limit(request, sampling, context_tokens, engine="engine hf")
        key = keys.setdefault(request.prompt_ids, first_key + len(keys))
        row = DecodingRow(request, limit, key)
        where = f"engine hf, sample {request.sample_id}"
        row.structured = RowStructure.of(request, vocabulary, where=where)
        if not sampling.greedy:
            row.temperature = temperature_of(request.options, where=where)
            row.shaping = RowShaping.of(request, banned, row.token_ids, where=where)
        rows.append(row)
    return rows


class TokenSampler:
    """Samples tokens for rows with the same sampling parameters, and ends the rows.

    The noise for token t of a row depends only on (seed, sample_id, branch, offset + t).
    """

    def __init__(
        self,
        seed: int,
        sampling: SamplingParams,
        stop: StopRule,
        banned: BannedWords | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        self._seed = seed
        self._sampling = sampling
        self.stop = stop
        self.banned = banned
        self.vocabulary = vocabulary
        """Returns the tokens of structured answers."""

    @property
    def is_greedy(self) -> bool:
        return self._sampling.greedy

    def draw(self, logits: Tensor, rows: Sequence[DecodingRow]) -> None:
        """Append one token to each row, from `logits` [n, V]. The rows have the same `_kind_of_draw`.

        Raises `DivergenceError` if the logits are not finite.
        """
        structures = [row.structured for row in rows]
        drawn = (
            greedy_sample(structured_logits(logits, structures))
            if self.is_greedy
            else self._sample(logits, rows, structures)
        )
        support = None if drawn.support_ids is None else drawn.support_ids.tolist()
        sampled = zip(rows, drawn.token_ids.tolist(), drawn.log_probs.tolist(), strict=True)
        for index, (row, token, log_prob) in enumerate(sampled):
            if not isfinite(log_prob):
                raise DivergenceError(
                    f"the log-prob of token {len(row.token_ids)} of sample {row.request.sample_id} is {log_prob}",
                    where="engine hf",
                    hint="the weights have diverged: lower optimizer.lr",
                )
            row.token_ids.append(token)
            if row.shaping is not None:
                row.shaping.add(token)
            if row.structured is not None:
                row.structured.add(token)
            row.logprobs.append(log_prob)
            row.versions.append(row.version)
            if support is not None:
                row.support_ids.append([kept for kept in support[index] if kept >= 0])

    def _sample(
        self, logits: Tensor, rows: Sequence[DecodingRow], structures: Sequence[RowStructure | None]
    ) -> SampledTokens:
        self._draw_noise([row for row in rows if len(row.noise) == len(row.token_ids)])
        noise = torch.tensor([row.noise[len(row.token_ids)] for row in rows], dtype=torch.float64)
        sampling = self._sampling
        temperature: float | Tensor = sampling.temperature
        if rows[0].temperature is not None:
            temperature = torch.tensor([[row.temperature] for row in rows], device=logits.device)
        min_p, shapings = 0.0, [row.shaping for row in rows if row.shaping is not None]
        if shapings:
            logits, min_p = shaped_rows(logits, shapings), shapings[0].min_p
        logits = structured_logits(logits, structures)
        noise = noise.to(logits.device)
        return inverse_cdf_sample(logits, noise, temperature, sampling.top_k, sampling.top_p, min_p)

    def _draw_noise(self, rows: Sequence[DecodingRow]) -> None:
        """Extend the noise of `rows` by a block. A row's noise depends only on its own counter."""
        if not rows:
            return
        samples = torch.tensor([row.request.sample_id for row in rows])
        branches = torch.tensor([row.request.branch for row in rows])
        starts = torch.tensor([row.request.offset + len(row.noise) for row in rows])
        count = min(NOISE_TOKENS, max(row.limit - len(row.noise) for row in rows))
        tokens = starts[:, None] + torch.arange(count)
        # The upper 32 bits of a token's number are free, since responses are shorter than 2^32 tokens.
        blocks = uniforms(self._seed, samples[:, None], tokens + (branches[:, None] << 32))
        for row, block in zip(rows, blocks.tolist(), strict=True):
            row.noise.extend(block)


def _kind_of_draw(row: DecodingRow) -> tuple[bool, float | None]:
    """Whether the row uses the temperature of the sampling parameters, and its min-p (None: nothing is shaped)."""
    return row.temperature is None, None if row.shaping is None else row.shaping.min_p


def sample(logits: Tensor, rows: Sequence[DecodingRow]) -> list[DecodingRow]:
    """Append one token to each row, from `logits` [n, V], and return the rows that end with it.

    Raises `DivergenceError` if the logits are not finite.
    """
    groups: dict[tuple[TokenSampler, bool, float | None], list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.sampler, *_kind_of_draw(row)), []).append(place)
    for (sampler, *_), places in groups.items():
        if len(groups) == 1:
            sampler.draw(logits, rows)
            break
        sampler.draw(logits[torch.tensor(places, device=logits.device)], [rows[place] for place in places])
    finished = []
    for row in rows:
        row.finish_reason = row.sampler.stop.reason(row.token_ids, row.limit)
        if row.finish_reason is None and row.structured is not None and row.structured.allowed is None:
            row.finish_reason = "length"  # its grammar exceeds a limit here
        if row.finish_reason is not None:
            finished.append(row)
    return finished
