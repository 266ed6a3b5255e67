"""Estimators that credit turns, through the whole algorithm, against slow float64 loops over plain descriptions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.batching import collate
from rlhf_core.columns import Column, Columns
from rlhf_core.errors import RlhfError
from rlhf_core.rollout.episode_metrics import EPISODE_COLUMNS
from rlhf_core.types import BufferItem, Experience
from rlhf_objective import AdvantageInput, FunctionUse, Turns, credits_turns, needs

from .conftest import make_algorithm

KL_COEF = 0.125  # all numbers are exact in float32: rounding would be the whole spread of equal returns
STATE = {"turn_state": Column(dtype="int64")}


@dataclass(frozen=True)
class Turn:
    """A turn as an oracle sees it."""

    observation: tuple[int, ...]
    kl: tuple[float, ...]
    """Of each sampled token."""
    reward: float
    state: int = 0


@dataclass(frozen=True)
class Sample:
    group: int
    rows: tuple[tuple[Turn, ...], ...]
    """Turns in each branch."""
    outcome: float = 0.0

    @property
    def turns(self) -> list[Turn]:
        return [turn for row in self.rows for turn in row]

    @property
    def rewards(self) -> list[float]:
        own = [turn.reward - KL_COEF * math.fsum(turn.kl) for turn in self.turns]
        own[-1] += self.outcome
        return own

    def returns(self, gamma: float) -> list[float]:
        return [
            math.fsum(gamma ** (later - k) * self.rewards[later] for later in range(k, len(self.turns)))
            for k in range(len(self.turns))
        ]


def experience(samples: Sequence[Sample], *, with_states: bool = False) -> Experience:
    """Rows as a run makes them, with the columns of the section `environment`."""
    items = [item for number, sample in enumerate(samples) for item in _items(number, sample, with_states)]
    batch = collate(items)
    return replace(batch, scores=batch.rewards["environment"])


def _items(number: int, sample: Sample, with_states: bool) -> Iterable[BufferItem]:
    total = math.fsum([sample.outcome, *(turn.reward for turn in sample.turns)])
    for branch, row in enumerate(sample.rows):
        ids: list[int] = []
        mask: list[bool] = []
        kl: list[float] = []
        earned: list[float] = []
        states: list[int] = []
        for place, turn in enumerate(row):
            # The first observation belongs to the prompt.
            given = turn.observation if place else ()
            ids += [*given, *(40 + (7 * number + place + i) % 9 for i in range(len(turn.kl)))]
            mask += [False] * len(given) + [True] * len(turn.kl)
            kl += [0.0] * len(given) + list(turn.kl)
            earned += [0.0] * (len(given) + len(turn.kl) - 1) + [turn.reward]
            states += [0] * len(given) + [turn.state] * len(turn.kl)
        values: dict[str, Any] = {"turn_rewards": torch.tensor(earned).unsqueeze(-1), "environment": {}}
        if with_states:
            values["turn_state"] = states
        yield BufferItem(
            sample_id=number,
            group_id=sample.group,
            policy_version=0,
            branch=branch,
            prompt_ids=torch.tensor([5, sample.group + 10, *row[0].observation]),
            response_ids=torch.tensor(ids),
            action_mask=torch.tensor(mask),
            action_log_probs=torch.tensor(kl),
            reference_log_probs=torch.zeros(len(ids)),
            rewards={"environment": total},
            columns=Columns(values, {**EPISODE_COLUMNS, **STATE}),
        )


def estimate(samples: Sequence[Sample], options: dict[str, Any], **more: Any) -> list[list[list[float]]]:
    """Advantages of each turn's tokens, per sample."""
    kl = {"kl_coef": KL_COEF, "kl_in": "reward", "kl_estimator": "k1"}
    episode = experience(samples, **more)
    algorithm = make_algorithm("grpo", {**kl, **options}, samples_per_prompt=4)
    output = algorithm.advantages(episode)
    assert output.advantages.dtype == torch.float32
    assert not bool(output.advantages[~episode.action_mask].any())
    found: list[list[list[float]]] = []
    row = 0
    for sample in samples:
        found.append([])
        for turns in sample.rows:
            values = output.advantages[row][episode.action_mask[row]].tolist()
            for turn in turns:
                found[-1].append(values[: len(turn.kl)])
                values = values[len(turn.kl) :]
            row += 1
    return found


def slow_normalised(value: float, others: list[float], divide: bool, leave_one_out: bool = False) -> float:
    """`others` includes `value`."""
    if len(others) < 2 or min(others) == max(others):
        return 0.0
    centered = value - statistics.fmean(others)
    if leave_one_out:
        centered *= len(others) / (len(others) - 1)
    return centered / (statistics.stdev(others) + 1e-6) if divide else centered


def check(found: list[list[list[float]]], samples: Sequence[Sample], expected: Callable[[int, int], float]) -> None:
    for i, sample in enumerate(samples):
        for k, turn in enumerate(sample.turns):
            assert found[i][k] == pytest.approx([expected(i, k)] * len(turn.kl), rel=1e-4, abs=1e-4)


finite = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 3.0])
turns = st.builds(
    Turn,
    observation=st.sampled_from([(20,), (21,), (20, 21)]),
    kl=st.lists(st.sampled_from([-0.5, 0.0, 0.125, 1.0]), min_size=1, max_size=3).map(tuple),
    reward=finite,
    state=st.integers(1, 2),
)
rows_of_turns = st.lists(turns, min_size=1, max_size=3).map(tuple)
some_samples = st.lists(
    st.builds(
        Sample,
        group=st.integers(0, 1),
        rows=st.lists(rows_of_turns, min_size=1, max_size=2).map(tuple),
        outcome=finite,
    ),
    min_size=1,
    max_size=6,
).map(lambda samples: sorted(samples, key=lambda sample: sample.group))
gammas = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@settings(deadline=None, max_examples=60)
@given(some_samples, gammas, st.booleans(), st.booleans())
def test_turn_normalised_compares_turns_of_one_number(
    samples: list[Sample], gamma: float, divide: bool, without_itself: bool
) -> None:
    options = {"advantage": "turn-normalised", "turn_gamma": gamma}
    found = estimate(samples, {**options, "divide_by_std": divide, "leave_one_out": without_itself})

    def expected(i: int, k: int) -> float:
        others = [each.returns(gamma)[k] for each in samples if each.group == samples[i].group and len(each.turns) > k]
        return slow_normalised(samples[i].returns(gamma)[k], others, divide, without_itself)

    check(found, samples, expected)


@settings(deadline=None, max_examples=60)
@given(
    some_samples,
    gammas,
    st.booleans(),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from(["observation", "history", "environment"]),
)
def test_gigpo_adds_the_turns_from_one_state(
    samples: list[Sample], gamma: float, divide: bool, weight: float, state: str
) -> None:
    advantage = {"name": "gigpo", "step_weight": weight, "state": state}
    options = {"advantage": advantage, "turn_gamma": gamma, "divide_by_std": divide}
    found = estimate(samples, options, with_states=True)
    has_steps = {sample.group for sample in samples if len(sample.turns) > 1}
    totals = [math.fsum(sample.rewards) for sample in samples]

    def seen(i: int, k: int) -> Any:
        """State before turn k: by its text, or by hand."""
        sample = samples[i]
        row, place = next(
            (row, k - first)
            for first, row in zip(_firsts(sample), sample.rows, strict=True)
            if first <= k < first + len(row)
        )
        turn = row[place]
        if state == "environment":
            return turn.state
        if state == "observation":
            # The prompt is what a first turn has observed.
            return turn.observation if place else ("prompt", turn.observation)
        texts: list[Any] = [("prompt", row[0].observation)]
        for earlier in range(place):
            n = len(row[earlier].kl)
            texts += [tuple(40 + (7 * i + earlier + j) % 9 for j in range(n)), row[earlier + 1].observation]
        # As token ids: the boundaries between turns do not matter.
        return texts[0], tuple(token for part in texts[1:] for token in part)

    def expected(i: int, k: int) -> float:
        group = [j for j, each in enumerate(samples) if each.group == samples[i].group]
        value = slow_normalised(totals[i], [totals[j] for j in group], divide)
        if samples[i].group not in has_steps:
            return value
        peers = [
            samples[j].returns(gamma)[n]
            for j in group
            for n in range(len(samples[j].turns))
            if seen(j, n) == seen(i, k)
        ]
        return value + weight * slow_normalised(samples[i].returns(gamma)[k], peers, divide)

    check(found, samples, expected)


def _firsts(sample: Sample) -> list[int]:
    return [sum(map(len, sample.rows[:row])) for row in range(len(sample.rows))]


@settings(deadline=None, max_examples=60)
@given(some_samples, gammas, st.sampled_from(["episode", "turn"]))
def test_turn_to_go_is_whitened_over_tokens(samples: list[Sample], gamma: float, over: str) -> None:
    advantage = {"name": "turn-to-go", "whiten_over": over}
    found = estimate(samples, {"advantage": advantage, "turn_gamma": gamma})
    values: dict[tuple[int, int, int], float] = {}
    for i, sample in enumerate(samples):
        for k, turn in enumerate(sample.turns):
            for t in range(len(turn.kl)):
                values[i, k, t] = sample.returns(gamma)[k] + KL_COEF * math.fsum(turn.kl[:t])
    for (i, k, t), value in values.items():
        others = [each for (_, n, _), each in values.items() if over == "episode" or n == k]
        mean, deviation = statistics.fmean(others), math.sqrt(statistics.pvariance(others) + 1e-8)
        if deviation > 2e-4:  # otherwise float32 rounding
            assert found[i][k][t] == pytest.approx((value - mean) / deviation, rel=1e-4, abs=1e-4)


SINGLE = [
    Sample(group, ((Turn((20,), kl, 0.0),),), outcome)
    for group, outcome, kl in [
        (0, 1.0, (0.1, 0.2)),
        (0, 0.0, (0.3,)),
        (0, 0.5, (0.0, 0.0, 0.1)),
        (1, 2.0, (0.2,)),
        (1, 2.5, (0.1, -0.4)),
    ]
]


@pytest.mark.parametrize("gamma", [0.3, 1.0])
@pytest.mark.parametrize(
    ("by_turn", "whole"),
    [("turn-normalised", "group-normalised"), ("gigpo", "group-normalised"), ("turn-to-go", "reward-to-go")],
)
def test_single_turns_equal_the_estimator_of_the_episode(by_turn: str, whole: str, gamma: float) -> None:
    ours = estimate(SINGLE, {"advantage": by_turn, "turn_gamma": gamma})
    for mine, other in zip(ours, estimate(SINGLE, {"advantage": whole}), strict=True):
        assert mine[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("by_turn", ["turn-normalised", "gigpo", "turn-to-go"])
def test_a_run_without_an_environment_has_single_turns(episode: Callable[..., Experience], by_turn: str) -> None:
    answers = episode([1.0, 0.0, 0.5, 2.0], [0, 0, 1, 1], [3, 1, 2, 4])
    whole = "reward-to-go" if by_turn == "turn-to-go" else "group-normalised"
    found, other = (
        make_algorithm("grpo", {"advantage": name, "kl_coef": 0}).advantages(answers).advantages
        for name in (by_turn, whole)
    )
    torch.testing.assert_close(found, other)


def test_gigpo_by_hand() -> None:
    """Two answers, gamma 0.5. The second turns start from different observations, the first ones from the prompt."""
    samples = [
        Sample(0, ((Turn((20,), (0.0,), 0.0), Turn((21,), (0.0,), 4.0)),)),
        Sample(0, ((Turn((20,), (0.0,), 1.0), Turn((20,), (0.0,), 0.0)),)),
    ]
    options = {"advantage": "gigpo", "turn_gamma": 0.5, "divide_by_std": False}
    # Totals 4 and 1: +-1.5. Returns of the first turns 0 + 0.5 * 4 and 1: +-0.5. The others are alone.
    assert estimate(samples, options) == [[[2.0], [1.5]], [[-2.0], [-1.5]]]


NUMBER = {"turn_number": Column(dtype="int32", fill=-1, optional=True)}


def numbered(samples: Sequence[Sample], numbers: Sequence[Sequence[int]]) -> Experience:
    """Rows of samples whose environment numbers the turns: the number of each token of the response."""
    batch = experience(samples)
    width = batch.action_mask.shape[-1]
    padded = torch.tensor([[*row, *(-1 for _ in range(width - len(row)))] for row in numbers])
    return replace(batch, columns=batch.columns | Columns({"turn_number": padded}, NUMBER))


def test_turns_follow_the_order_of_sampling_over_branches() -> None:
    """The first branch continues after a turn in the second one. Gamma 0.5."""
    first, second, third = (Turn((20,), (0.0,), reward) for reward in (1.0, 2.0, 4.0))
    samples = [Sample(0, ((first, third), (second,)), outcome=8.0), Sample(0, ((first, first, first),))]
    numbers = [[0, -1, 2], [1], [0, -1, 1, -1, 2]]
    algorithm = make_algorithm(
        "grpo",
        {"advantage": "turn-normalised", "turn_gamma": 0.5, "divide_by_std": False, "kl_coef": 0},
        samples_per_prompt=2,
    )
    episode = numbered(samples, numbers)
    # In the order of sampling, the returns are 5, 8, 12 (the outcome is of the third turn), and 1.75, 1.5, 1.
    expected = {0: (5 - 1.75) / 2, 1: (8 - 1.5) / 2, 2: (12 - 1) / 2}
    found = algorithm.advantages(episode).advantages
    for row, places in enumerate(numbers):
        sign = 1 if row < 2 else -1
        wanted = [0.0 if number < 0 else sign * expected[number] for number in places]
        assert found[row, : len(places)].tolist() == pytest.approx(wanted)


def test_turns_without_an_observation_between_them_are_two() -> None:
    samples = [Sample(0, ((Turn((20,), (0.0, 0.0), 4.0),),)), Sample(0, ((Turn((20,), (0.0, 0.0), 0.0),),))]
    algorithm = make_algorithm(
        "grpo",
        {"advantage": "turn-normalised", "turn_gamma": 0.5, "divide_by_std": False, "kl_coef": 0},
        samples_per_prompt=2,
    )
    found = algorithm.advantages(numbered(samples, [[0, 1], [0, 1]])).advantages
    assert found.tolist() == [[1.0, 2.0], [-1.0, -2.0]]


def test_rows_that_are_masked_have_no_turns() -> None:
    """As the filler of a rank without rows of its own."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    rows = AdvantageInput(torch.ones(2, 3), mask, torch.tensor([0, 1]), turn_numbers=torch.full((2, 3), -1))
    turns = Turns.of(rows)
    assert turns.numbers.numel() == 0 and turns.returns(0.5).numel() == 0
    for name in ("turn-normalised", "gigpo", "turn-to-go"):
        assert FunctionUse("advantages", name).bind(where="test")(rows).tolist() == [[0.0] * 3] * 2


def test_states_that_the_environment_does_not_report_are_an_error() -> None:
    samples = [Sample(0, ((Turn((20,), (0.0,), 0.0), Turn((21,), (0.0,), 4.0)),))]
    with pytest.raises(RlhfError, match="turn_state"):
        estimate(samples, {"advantage": {"name": "gigpo", "state": "environment"}})


def test_only_estimators_with_tokens_credit_turns() -> None:
    assert credits_turns(FunctionUse("advantages", "gigpo").bind(where="test"))
    assert not credits_turns(FunctionUse("advantages", "group-normalised").bind(where="test"))
    for what in ("scalars", "row"):
        with pytest.raises(ValueError, match="needs episode"):
            needs(what, credits_turns=True)
