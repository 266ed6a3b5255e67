"""How the answers of a failed batch are asked about alone: in which order, for how long, how often."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from faulty_rewards import make_rollout

from rlhf_containment.rewards.attribution import MAX_DEADLINES, MAX_LOST, MAX_TIMEOUTS, score_alone
from rlhf_containment.rewards.isolate import LostReward
from rlhf_core.rewards.threads import DeadlinePassed
from rlhf_core.rewards.values import BadScore, RewardFault

FAULT = DeadlinePassed("gave no answer within 16 s")


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in calls; other threads of this process keep the real one."""
    now = [0.0]
    monkeypatch.setattr("rlhf_containment.rewards.attribution.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def alone(clock, needs, prepare=lambda: None, fault=FAULT):
    """Score answers that need so many seconds; infinity crashes. Returns outcomes, and what was asked."""
    asked = []

    def ask(rollout, seconds):
        need = needs[rollout.sample_id]
        asked.append((rollout.sample_id, seconds))
        if need == float("inf"):
            return LostReward("crashed")
        clock[0] += min(need, seconds)
        return float(rollout.sample_id) if need <= seconds else DeadlinePassed(f"gave no answer within {seconds:g} s")

    batch = [make_rollout(index) for index in range(len(needs))]
    return score_alone(ask, prepare, batch, fault, 16.0), asked


def test_a_slow_answer_gets_the_whole_time_in_the_second_round(clock):
    outcomes, asked = alone(clock, [0, 10, 0, 0])
    assert outcomes == [0, 1, 2, 3]
    assert asked[-1] == (1, 16.0)
    assert [number for number, _ in asked] == [0, 1, 2, 3, 1]


def test_a_crash_is_final(clock):
    outcomes, asked = alone(clock, [0, float("inf"), 0])
    assert (outcomes[0], outcomes[2], len(asked)) == (0, 2, 3)
    assert isinstance(outcomes[1], LostReward)
    assert str(outcomes[1]) == (
        "crashed, scoring this answer alone after a call with 3 answers failed (gave no answer within 16 s)"
    )


@pytest.mark.parametrize("need", [100.0, float("inf")])
def test_time_and_number_of_failures_are_bounded(clock, need):
    needs = [0.0] + [need] * 100
    outcomes, asked = alone(clock, needs)
    assert outcomes[0] == 0 and all(isinstance(each, RewardFault) for each in outcomes[1:])
    assert clock[0] <= MAX_DEADLINES * 16.0 * (1 + 1 / MAX_TIMEOUTS)
    assert len(asked) <= 1 + MAX_DEADLINES * (MAX_TIMEOUTS if need < float("inf") else MAX_LOST)
    assert (outcomes[-1] is FAULT) == (need < float("inf"))  # crashes cost little time: all were tried
    first = [number for number, _ in asked[: len({number for number, _ in asked})]]
    assert len(first) == len(set(first))  # those not tried yet went first


def test_a_batch_in_which_nothing_can_be_scored_keeps_its_fault(clock):
    outcomes, asked = alone(clock, [100.0] * 4)
    assert outcomes == [FAULT] * 4
    assert len(asked) == 4


@pytest.mark.parametrize("error", [RewardFault("is closed"), OSError("no more processes")])
def test_without_a_process_it_ends(clock, error):
    def prepare():
        raise error

    assert alone(clock, [0, 0], prepare) == ([FAULT] * 2, [])


def test_an_invalid_score_is_an_answer(clock):
    def ask(rollout, seconds):
        return BadScore("no number")

    outcomes = score_alone(ask, lambda: None, [make_rollout(0), make_rollout(1)], FAULT, 16.0)
    assert outcomes == [BadScore("no number")] * 2


def test_correct_answers_after_many_that_hang_are_scored(clock):
    outcomes, asked = alone(clock, [100.0] * 16 + [0.1] * 7)
    assert outcomes[16:] == list(range(16, 23))
    assert all(isinstance(outcome, DeadlinePassed) for outcome in outcomes[:16])
    assert len(asked) == 16 + 7 + 16


def test_crashes_leave_time_for_the_answers_after_them(clock):
    outcomes, asked = alone(clock, [float("inf")] * 40 + [0.1] * 3)
    assert outcomes[40:] == [40, 41, 42]
    assert len(asked) == 43
