"""What each guard finds, and what it answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf_core.errors import DivergenceError, RlhfError
from rlhf_core.guards import GuardsConfig, NonFinite, OutOfBound, Plateau, make_guards
from rlhf_core.hooks.relay import HookRelay


def ask(guard, metrics, *, episode=0, error=None):
    relay = HookRelay()
    relay.register(guard)
    answers = relay.fire("verdict", step=1, episode=episode, metrics=metrics, error=error)
    return answers[0] if answers else None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss/policy", "reward/mean"])
def test_what_is_not_finite_is_found(name, value):
    verdict = ask(NonFinite("non_finite", "stop"), {name: value, "kl/mean": 0.1})
    assert verdict.action == "stop"
    assert name in verdict.reason


def test_an_update_that_diverged_is_found_and_another_error_is_not():
    guard = NonFinite("non_finite", "skip")
    assert ask(guard, {}, error=DivergenceError("the gradient is inf")).reason == "the gradient is inf"
    assert ask(guard, {}, error=RlhfError("something else")) is None
    assert ask(guard, {"value/explained_variance": math.nan}) is None


@given(value=st.floats(-10, 10), high=st.floats(-5, 5))
def test_a_bound_is_crossed_exactly_above_it(value, high):
    verdict = ask(OutOfBound("kl", "rollback", "kl/mean", high=high), {"kl/mean": value})
    assert (verdict is not None) == (value > high)


def test_a_bound_below_and_a_metric_that_is_absent_or_nan():
    guard = OutOfBound("entropy", "stop", "policy/entropy", low=0.1)
    assert ask(guard, {"policy/entropy": 0.05}).reason == "policy/entropy is 0.05, below 0.1"
    assert ask(guard, {"policy/entropy": 0.1}) is None
    assert ask(guard, {}) is None
    assert ask(guard, {"policy/entropy": math.nan}) is not None


def trips(guard, rewards):
    return [e for e, reward in enumerate(rewards) if guard.problem(e, {"reward/mean": reward}, None)]


def test_a_plateau_trips_after_its_episodes_and_again_after_as_many():
    rewards = [0.0, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]
    assert trips(Plateau("plateau", "warn", episodes=3, min_improvement=0.0), rewards) == [5, 8]
    assert trips(Plateau("plateau", "warn", episodes=3, min_improvement=0.15), rewards) == [5, 8]
    assert trips(Plateau("plateau", "warn", episodes=3, min_improvement=0.0), [0.1 * e for e in range(9)]) == []


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.data())
def test_a_plateau_that_is_resumed_trips_where_it_would_have(rewards, data):
    cut = data.draw(st.integers(0, len(rewards)))
    straight = trips(Plateau("plateau", "warn", episodes=2, min_improvement=0.1), rewards)
    resumed = Plateau("plateau", "warn", episodes=2, min_improvement=0.1)
    trips(resumed, [1.0, 1.0])  # what it saw before it was rolled back is forgotten
    resumed.restart([{"episode": e, "reward/mean": r} for e, r in enumerate(rewards[:cut])])
    later = [e for e in range(cut, len(rewards)) if resumed.problem(e, {"reward/mean": rewards[e]}, None)]
    assert later == [e for e in straight if e >= cut]


def test_a_warning_is_given_once_an_episode(caplog):
    guard = OutOfBound("kl", "warn", "kl/mean", high=0.1)
    for episode in (0, 0, 1):
        assert ask(guard, {"kl/mean": 0.2}, episode=episode) is None
    assert len([record for record in caplog.records if "kl/mean is 0.2, above 0.1" in record.message]) == 2


def test_by_default_only_what_is_not_finite_stops_and_a_gap_warns():
    assert {guard.name for guard in make_guards(GuardsConfig())} == {"non_finite", "log_prob_gap"}
    every = GuardsConfig.model_validate({"kl": {"bound": 1}, "entropy": {"bound": 0.1}, "plateau": {"episodes": 3}})
    assert len(make_guards(every)) == 5
    assert every.rolling_back == []


@pytest.mark.parametrize(
    "wrong",
    [{"non_finite": {"action": "warn"}}, {"kl": {"bound": 0}}, {"kl": {"limit": 1}}, {"rollback": {"lr_factor": 1.5}}],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        GuardsConfig.model_validate(wrong)
