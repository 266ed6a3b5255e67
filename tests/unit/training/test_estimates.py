"""Advantages and metrics of an episode are the same numbers for any number of ranks, whatever the algorithm needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.columns import Column, Columns
from rlhf_core.components import AlgorithmContext
from rlhf_core.plugins.selected import load
from rlhf_core.rewards.scorer import RewardCombiner
from rlhf_core.rollout import collected_episode
from rlhf_core.rollout.samples import GREEDY_COLUMNS, GREEDY_REWARDS
from rlhf_core.training.batches import BatchPlan
from rlhf_core.training.estimates import EpisodeEstimator, EstimatedEpisode
from rlhf_core.types import BufferItem, Experience, PhaseTimes, SamplingParams
from rlhf_core.util.rng import permutation
from rlhf_forward import to_tokens
from rlhf_objective import AdvantageInput, group_normalised
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.samples import make_item
from rlhf_testing.thread_ranks import Ranks


def estimates(algorithm: Any, items: list[BufferItem], plan: BatchPlan, strategy: Any) -> Any:
    combiner = RewardCombiner({"score": 2.0})
    return EpisodeEstimator(algorithm, combiner, strategy, plan).of(collected_episode(items, PhaseTimes()), 0)


def used(found: EstimatedEpisode) -> dict[tuple[int, int], BufferItem]:
    """The real rows in this rank's batches."""
    trained_on, mine = (
        [item for each in found.epochs for batch in each for item in batch],
        set(map(id, found.items)),
    )
    items = [item for item in trained_on if id(item) in mine]
    fillers = [item for item in trained_on if id(item) not in mine]
    assert not any(item.action_mask.any() or item.advantages.shape != item.response_ids.shape for item in fillers)
    assert {id(item) for item in items} == {id(item) for item in found.items}
    return {(item.sample_id, item.branch): item for item in items}


def make(name: str, options: Mapping[str, Any]) -> Any:
    selected = load("algorithms", name)
    context = AlgorithmContext(
        sampling=SamplingParams(max_new_tokens=8), samples_per_prompt=2, tokenizer=tiny_tokenizer()
    )
    return selected.build(selected.component.config.model_validate(dict(options)), context)


def of_groups(rows: AdvantageInput) -> torch.Tensor:
    """An estimator that sees whole groups, and counts their rows."""
    sizes = (rows.group_ids[:, None] == rows.group_ids).sum(-1)
    values = group_normalised(rows.totals, rows.group_ids, sample_ids=rows.sample_ids)
    return to_tokens(values + sizes, rows.mask)


def of_the_episode(rows: AdvantageInput) -> torch.Tensor:
    return to_tokens(rows.totals - rows.totals.mean(), rows.mask)


class Estimating:
    """`grpo` with an estimator of this file."""

    def __init__(self, estimator: Any, needs: str) -> None:
        self._inner = make("grpo", {"kl_coef": 0.1, "kl_in": "reward"})
        self._inner.estimator = estimator
        self.needs_all_rows = needs == "episode"
        if needs != "episode":
            estimator.needs = needs

    def masked(self, item: BufferItem) -> BufferItem:
        return self._inner.masked(item)

    def advantages(self, episode: Experience) -> Experience:
        return self._inner.advantages(episode)


OFF_POLICY = {"importance_cap": 1.05, "importance_token_range": [0.9, 1.1]}
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "ppo": lambda: make("ppo", {"kl_coef": 0.1, "importance_cap": 1.02}),
    "ppo, kl in the loss, not whitened": lambda: make("ppo", {"kl_in": "loss", "whiten_advantages": False}),
    "grpo": lambda: make("grpo", {"kl_coef": 0.1, "kl_in": "reward"}),
    "grpo, off-policy": lambda: make("grpo", {"kl_coef": 0.1, "overlong_buffer_tokens": 6, **OFF_POLICY}),
    "grpo, truncated masked": lambda: make("grpo", {"mask_truncated": True, "divide_by_std": False}),
    "rloo": lambda: make("rloo", {"kl_coef": 0.1}),
    "reinforce++": lambda: make("reinforce++", {"kl_coef": 0.1}),
    "group-whitened": lambda: make("grpo", {"advantage": "group-whitened"}),
    "remax": lambda: make("grpo", {"advantage": "remax", "kl_coef": 0.1, "kl_in": "reward"}),
    "ppo with remax": lambda: make("ppo", {"advantage": "remax", "whiten_advantages": False}),
    "groups": lambda: Estimating(of_groups, "episode"),
    "episode": lambda: Estimating(of_the_episode, "episode"),
}


@st.composite
def episodes(draw: st.DrawFn) -> list[BufferItem]:
    """Groups of two or three samples, some with branches; random lengths, rewards, values and log-probs."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    branching = draw(st.booleans())
    items = []
    for group in range(draw(st.integers(1, 6))):
        greedy = float(torch.randint(0, 3, (), generator=seed))
        for k in range(draw(st.integers(2, 3))):
            reward = float(torch.randint(0, 3, (), generator=seed))
            for branch in range(draw(st.integers(1, 3)) if branching else 1):
                length = draw(st.integers(1, 7))
                item = make_item(group * 3 + k, group_id=group, num_actions=length, reward=reward)
                drawn = torch.randn(3, length, generator=seed) / 10
                items.append(
                    replace(
                        item,
                        branch=branch,
                        values=drawn[0],
                        reference_log_probs=item.action_log_probs + drawn[1],
                        trainer_log_probs=item.action_log_probs + drawn[2],
                        truncated=length == 7,
                        columns=Columns({GREEDY_REWARDS: {"score": greedy}}, GREEDY_COLUMNS),
                    )
                )
    return items


@pytest.mark.parametrize("name", ALGORITHMS)
@given(items=episodes(), batch=st.integers(1, 9), epochs=st.integers(1, 2), world=st.integers(2, 4))
@settings(max_examples=12)
def test_ranks_compute_what_one_computes(
    name: str, items: list[BufferItem], batch: int, epochs: int, world: int
) -> None:
    alone = BatchPlan(batch, epochs, 0, 1)
    (expected,) = Ranks(1).run(lambda _, strategy: estimates(ALGORITHMS[name](), items, alone, strategy))
    rows = used(expected)
    assert len(rows) == len(items)

    plans = [BatchPlan(batch, epochs, rank, world) for rank in range(world)]
    found = Ranks(world).run(lambda rank, strategy: estimates(ALGORITHMS[name](), items, plans[rank], strategy))
    seen: set[tuple[int, int]] = set()
    for made in found:
        assert made.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
        assert made.scores == expected.scores
        for place, item in used(made).items():
            same_numbers(item, rows[place])
            seen.add(place)
    assert seen == set(rows)


def same_numbers(item: BufferItem, expected: BufferItem) -> None:
    assert item.advantages is not None and expected.advantages is not None
    torch.testing.assert_close(item.advantages, expected.advantages, rtol=1e-5, atol=1e-6)
    assert torch.equal(item.action_mask, expected.action_mask)
    assert (item.returns is None) == (expected.returns is None)
    if item.returns is not None:
        torch.testing.assert_close(item.returns, expected.returns, rtol=1e-5, atol=1e-6)
    assert torch.equal(item.trainer_log_probs, expected.trainer_log_probs)


class Drawn(BatchPlan):
    """Batches of which a later one gives a sample to another rank than an earlier one."""

    mixes_ranks = True

    def passes(self, samples: Any) -> Any:
        for step in range(self.epochs_per_episode):
            yield [permutation(len(samples), 0, "drawn", step)[: self.train_batch_size]]


@given(items=episodes(), world=st.integers(2, 4))
@settings(max_examples=12)
def test_a_row_that_several_ranks_use_reaches_each(items: list[BufferItem], world: int) -> None:
    alone = BatchPlan(4, 1, 0, 1)
    (expected,) = Ranks(1).run(lambda _, strategy: estimates(ALGORITHMS["ppo"](), items, alone, strategy))
    rows = used(expected)
    plans = [Drawn(3, 4, rank, world) for rank in range(world)]
    found = Ranks(world).run(lambda rank, strategy: estimates(ALGORITHMS["ppo"](), items, plans[rank], strategy))
    for made in found:
        for place, item in used(made).items():
            same_numbers(item, rows[place])


class Shifting:
    """Replaces what it is given, as an algorithm may."""

    def __init__(self, needs: str) -> None:
        self._inner, self.needs_all_rows = make("ppo", {"kl_coef": 0.1}), needs == "episode"

    def masked(self, item: BufferItem) -> BufferItem:
        return self._inner.masked(item)

    def advantages(self, episode: Experience) -> Experience:
        shifted = replace(episode, values=episode.values + 1, action_log_probs=episode.action_log_probs - 1)
        return self._inner.advantages(shifted)


@pytest.mark.parametrize("needs", ["row", "episode"])
def test_what_an_algorithm_replaces_is_what_it_trains_on(needs: str) -> None:
    items = [replace(make_item(i, group_id=i // 2), values=torch.zeros(4)) for i in range(6)]
    items = [replace(item, reference_log_probs=item.action_log_probs) for item in items]
    plans = [BatchPlan(6, 1, rank, 2) for rank in range(2)]
    found = Ranks(2).run(lambda rank, strategy: estimates(Shifting(needs), items, plans[rank], strategy))
    for made in found:
        for (sample, _), item in used(made).items():
            assert item.values.tolist() == [1.0] * 4
            assert torch.equal(item.action_log_probs, items[sample].action_log_probs - 1)


def test_turns_earn_what_each_reward_gave_them() -> None:
    """By hand: gamma and lam 1, values 0, so a token's advantage is what is earned from it on."""
    given = torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.0, 0.0], [2.0, -1.0]])
    turns = Columns({"turn_rewards": given}, {"turn_rewards": Column()})
    item = replace(make_item(0), rewards={"environment": 5.0, "steps": 4.0}, columns=turns)
    item = replace(item, values=torch.zeros(4), reference_log_probs=item.action_log_probs)
    algorithm = make("ppo", {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False, "kl_coef": 0.0})
    combiner = RewardCombiner({"environment": 2.0, "steps": 10.0})

    def work(rank: int, strategy: Any) -> list[float]:
        made = EpisodeEstimator(algorithm, combiner, strategy, BatchPlan(1, 1, rank, 1))
        found = made.of(collected_episode([item], PhaseTimes()), 0)
        assert found.scores == [50.0]
        return used(found)[0, 0].advantages.tolist()

    # The turns earn 2 + 5 and 4 - 10; what is left of 50 stands at the end.
    (found,) = Ranks(1).run(work)
    assert found == [50.0, 50.0, 43.0, 43.0]
