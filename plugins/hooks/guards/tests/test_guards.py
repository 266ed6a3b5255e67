"""What each guard finds, and what it answers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf_core.errors import DivergenceError, RlhfError
from rlhf_core.hookspecs import Moment
from rlhf_core.runfolder.folder import RunFolder
from rlhf_guards.checks import Plateau, check_bound
from rlhf_guards.config import GuardsConfig, PlateauGuard
from rlhf_guards.guards import Guards


@pytest.fixture
def make(tmp_path):
    def make(**options):
        return Guards(GuardsConfig.model_validate(options), RunFolder(tmp_path))

    return make


def ask(guards, metrics, *, episode=0, error=None):
    at = "update" if error is None else "failed-update"
    actions = guards.rlhf_decide(Moment(at=at, step=1, episode=episode, metrics=metrics, error=error))
    assert len(actions) < 2
    return actions[0] if actions else None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss/policy", "reward/mean"])
def test_what_is_not_finite_is_found(make, name, value):
    action = ask(make(), {name: value, "kl/mean": 0.1})
    assert (action.kind, action.by, action.hint) == ("stop", "non_finite", "lower optimizer.lr")
    assert name in action.reason


def test_an_update_that_diverged_is_found_and_another_error_is_not(make):
    guards = make(non_finite={"action": "skip"})
    assert ask(guards, {}, error=DivergenceError("the gradient is inf")).reason == "the gradient is inf"
    assert ask(guards, {}, error=RlhfError("something else")) is None
    assert ask(guards, {"value/explained_variance": math.nan}) is None


@given(value=st.floats(-10, 10), bound=st.floats(-5, 5), sign=st.sampled_from([1, -1]))
def test_a_bound_is_crossed_exactly_beyond_it(value, bound, sign):
    found = check_bound({"kl/mean": value}, "kl/mean", bound, sign=sign)
    assert (found is not None) == (value > bound if sign == 1 else value < bound)


def test_a_bound_below_and_a_metric_that_is_absent_or_nan(make):
    guards = make(entropy={"action": "stop", "bound": 0.1})
    assert ask(guards, {"policy/entropy": 0.05}).reason == "policy/entropy is 0.05, below 0.1"
    assert ask(guards, {"policy/entropy": 0.1}) is None
    assert ask(guards, {}) is None
    assert ask(guards, {"policy/entropy": math.nan}).reason == "policy/entropy is nan"


def plateau(**options):
    return Plateau(PlateauGuard(**options))


def trips(guard, rewards):
    return [e for e, reward in enumerate(rewards) if guard.problem(e, {"reward/mean": reward})]


def test_a_plateau_trips_after_its_episodes_and_again_after_as_many():
    rewards = [0.0, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]
    assert trips(plateau(episodes=3, min_improvement=0.0), rewards) == [5, 8]
    assert trips(plateau(episodes=3, min_improvement=0.15), rewards) == [5, 8]
    assert trips(plateau(episodes=3, min_improvement=0.0), [0.1 * e for e in range(9)]) == []


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.data())
def test_a_plateau_that_is_resumed_trips_where_it_would_have(rewards, data):
    cut = data.draw(st.integers(0, len(rewards)))
    straight = trips(plateau(episodes=2, min_improvement=0.1), rewards)
    resumed = plateau(episodes=2, min_improvement=0.1)
    trips(resumed, [1.0, 1.0])  # what it saw before it was rolled back is forgotten
    resumed.restart([{"episode": e, "reward/mean": r} for e, r in enumerate(rewards[:cut])])
    later = [e for e in range(cut, len(rewards)) if resumed.problem(e, {"reward/mean": rewards[e]})]
    assert later == [e for e in straight if e >= cut]


def test_a_warning_is_given_once_an_episode(make, caplog):
    guards = make(kl={"action": "warn", "bound": 0.1})
    for episode in (0, 0, 1):
        assert ask(guards, {"kl/mean": 0.2}, episode=episode) is None
    assert len([record for record in caplog.records if "kl/mean is 0.2, above 0.1" in record.message]) == 2


def test_by_default_only_what_is_not_finite_stops_and_a_gap_warns():
    assert set(GuardsConfig().enabled) == {"non_finite", "log_prob_gap"}
    every = GuardsConfig.model_validate({"kl": {"bound": 1}, "entropy": {"bound": 0.1}, "plateau": {"episodes": 3}})
    assert len(every.enabled) == 5
    assert every.rolling_back == []


def test_what_was_seen_before_a_fit_is_read_from_its_lines(make, tmp_path):
    guards = make(plateau={"action": "stop", "episodes": 2})
    (tmp_path / "metrics.jsonl").write_text('{"episode": 0, "reward/mean": 1.0}\n{"episode": 1, "reward/mean": 1.0}\n')
    guards.rlhf_fit_start()
    assert ask(guards, {"reward/mean": 1.0}, episode=2).reason == "reward/mean has not risen above 1 for 2 episodes"


def test_a_rollback_has_its_options(make):
    guards = make(kl={"action": "rollback", "bound": 1}, rollback={"lr_factor": 0.1, "max_times": 7})
    action = ask(guards, {"kl/mean": 2.0})
    assert (action.kind, action.by, action.lr_factor, action.max_times) == ("rollback", "kl", 0.1, 7)
    assert guards.may_roll_back and not make().may_roll_back
    assert guards.rlhf_decide(Moment(at="episode", step=1, episode=0, metrics={"kl/mean": 2.0})) == []


@pytest.mark.parametrize(
    "wrong",
    [{"non_finite": {"action": "warn"}}, {"kl": {"bound": 0}}, {"kl": {"limit": 1}}, {"rollback": {"lr_factor": 1.5}}],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        GuardsConfig.model_validate(wrong)
