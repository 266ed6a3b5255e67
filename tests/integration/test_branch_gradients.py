"""The gradient of an episode with branches equals that of its turns, each in its own context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playing import driven, items, play_one

from rlhf_core.batching import collate
from rlhf_core.columns import Columns
from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import load
from rlhf_core.types import BufferItem, SamplingParams
from rlhf_episodes.contract import EpisodeTruncated, Outcome
from rlhf_testing.engine import FakeEngine
from rlhf_testing.models import tiny_model, tiny_tokenizer

LENGTHS = st.integers(1, 3)
FORKS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6)
"""Each turn: the branch that takes it, and whether that branch forks first."""


@pytest.fixture(scope="module")
def algorithm() -> Any:
    selected = load("algorithms", "grpo")
    config = selected.component.config.model_validate({"kl_coef": 0.0})
    sampling = SamplingParams(max_new_tokens=4)
    return selected.build(config, AlgorithmContext(sampling, samples_per_prompt=2, tokenizer=tiny_tokenizer()))


def played(turns: Sequence[tuple[int, bool]], lengths: Sequence[int]) -> list[BufferItem]:
    """Rows of an episode that forks where `turns` choose, as the trainer gets them."""
    sampled = iter(range(10_000))

    async def run(task: Any, policy: Any) -> Outcome:
        await policy.turn("7>")
        branches = [policy]
        for chosen, forks in turns:
            branch = branches[chosen % len(branches)]
            if forks:
                branch = branch.fork()
                branches.append(branch)
            try:
                await branch.turn(f"{chosen}>")
            except EpisodeTruncated:
                break
        return Outcome()

    def answer(request: Any, version: int) -> list[int]:
        number = next(sampled)
        return [5 + (3 * number + place) % 9 for place in range(lengths[number % len(lengths)])]

    return items(play_one(driven(run), engine=FakeEngine(answer=answer), max_turns=16))


def contexts(rows: Sequence[BufferItem]) -> list[BufferItem]:
    """Each sampled turn as a row: all ids before it are its prompt."""
    found: list[BufferItem] = []
    for row in rows:
        starts = (row.action_mask & ~torch.nn.functional.pad(row.action_mask, (1, 0))[:-1]).nonzero()[:, 0].tolist()
        for start in starts:
            length = 0
            while start + length < row.action_mask.numel() and row.action_mask[start + length]:
                length += 1
            turn = slice(start, start + length)
            assert row.advantages is not None
            found.append(
                replace(
                    row,
                    sample_id=len(found),
                    branch=0,
                    prompt_ids=torch.cat([row.prompt_ids, row.response_ids[:start]]),
                    response_ids=row.response_ids[turn],
                    action_mask=row.action_mask[turn],
                    action_log_probs=row.action_log_probs[turn],
                    advantages=row.advantages[turn],
                    columns=Columns(),
                )
            )
    return found


def gradient(algorithm: Any, model: torch.nn.Module, rows: Sequence[BufferItem]) -> torch.Tensor:
    model.zero_grad()
    output = algorithm.loss({"policy": model}, collate(list(rows)))
    output.sums["policy"].backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FORKS, st.lists(LENGTHS, min_size=1, max_size=4), st.integers(0, 2**31))
def test_branches_have_the_gradient_of_their_separate_contexts(
    algorithm: Any, turns: list[tuple[int, bool]], lengths: list[int], seed: int
) -> None:
    model = tiny_model()
    draw = torch.Generator().manual_seed(seed)
    rows = [
        replace(row, advantages=torch.randn(row.num_response_tokens, generator=draw), columns=Columns())
        for row in played(turns, lengths)
    ]
    separate = contexts(rows)
    assert sum(row.num_sampled_tokens for row in rows) == sum(row.num_sampled_tokens for row in separate)
    torch.testing.assert_close(
        gradient(algorithm, model, rows), gradient(algorithm, model, separate), rtol=1e-4, atol=1e-5
    )
