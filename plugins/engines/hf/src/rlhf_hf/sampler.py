"""Draws the next token of every row, with its log-prob, from one pass over the logits, and ends rows by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_core.errors import DivergenceError
from rlhf_core.types import SamplingParams
from rlhf_forward import SampledTokens, greedy_sample, inverse_cdf_sample, uniforms

from .rows import Row, StopRule

NOISE_TOKENS = 256
"""Tokens for which a row draws noise at once: many cost hardly more than one."""


class Sampler:
    """Samples and ends the rows with the same sampling parameters.

    The noise behind token t of a row depends on (seed, sample_id, branch, offset + t) only.
    """

    def __init__(self, seed: int, sampling: SamplingParams, stop: StopRule) -> None:
        self._seed = seed
        self._sampling = sampling
        self.stop = stop

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Append one token to each row. `logits` [n, V]. All rows have their own temperature, or none has.

        Raises `DivergenceError` when the logits are not finite.
        """
        drawn = greedy_sample(logits) if self._sampling.greedy else self._sample(logits, rows)
        support = None if drawn.support_ids is None else drawn.support_ids.tolist()
        sampled = zip(rows, drawn.token_ids.tolist(), drawn.log_probs.tolist(), strict=True)
        for index, (row, token, log_prob) in enumerate(sampled):
            if not math.isfinite(log_prob):
                raise DivergenceError(
                    f"the log-prob of token {len(row.token_ids)} of sample {row.request.sample_id} is {log_prob}",
                    where="engine hf",
                    hint="the weights have diverged: lower optimizer.lr",
                )
            row.token_ids.append(token)
            row.logprobs.append(log_prob)
            row.versions.append(row.version)
            if support is not None:
                row.support_ids.append([kept for kept in support[index] if kept >= 0])

    def _sample(self, logits: Tensor, rows: Sequence[Row]) -> SampledTokens:
        self._draw_noise([row for row in rows if len(row.noise) == len(row.token_ids)])
        noise = torch.tensor([row.noise[len(row.token_ids)] for row in rows], dtype=torch.float64)
        sampling = self._sampling
        temperature: float | Tensor = sampling.temperature
        if rows[0].temperature is not None:
            temperature = torch.tensor([[row.temperature] for row in rows], device=logits.device)
        return inverse_cdf_sample(logits, noise.to(logits.device), temperature, sampling.top_k, sampling.top_p)

    def _draw_noise(self, rows: Sequence[Row]) -> None:
        """Continue the noise of `rows` by a block; a row's noise depends on nothing but its own counter."""
        if not rows:
            return
        samples = torch.tensor([row.request.sample_id for row in rows])
        branches = torch.tensor([row.request.branch for row in rows])
        starts = torch.tensor([row.request.offset + len(row.noise) for row in rows])
        count = min(NOISE_TOKENS, max(row.limit - len(row.noise) for row in rows))
        tokens = starts[:, None] + torch.arange(count)
        # The upper half of a token's number is free: no response has 2^32 tokens.
        blocks = uniforms(self._seed, samples[:, None], tokens + (branches[:, None] << 32))
        for row, block in zip(rows, blocks.tolist(), strict=True):
            row.noise.extend(block)


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Row]:
    """Append one token to each row, and return those that end with it. `logits` [n, V].

    Raises `DivergenceError` when the logits are not finite.
    """
    alike: dict[tuple[Sampler, bool], list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault((row.sampler, row.temperature is None), []).append(place)
    for (sampler, _), places in alike.items():
        if len(alike) == 1:
            sampler.draw(logits, rows)
            break
        sampler.draw(logits[torch.tensor(places, device=logits.device)], [rows[place] for place in places])
    finished = []
    for row in rows:
        row.finish_reason = row.sampler.stop.reason(row)
        if row.finish_reason is not None:
            finished.append(row)
    return finished
