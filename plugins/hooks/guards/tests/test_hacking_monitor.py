"""The hook `hacking-monitor`: trends, false alarms, detection of planted hacks, and a run."""

from __future__ import annotations

import itertools
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.components import HookContext
from rlhf_core.errors import ConfigError
from rlhf_core.hookspecs import Moment
from rlhf_guards.hacking_monitor import HackingMonitor, MonitorConfig, level, num_tests
from rlhf_guards.trends import (
    higher_p_value,
    lag_1_autocorrelation,
    lower_p_value,
    student_p_value,
    trend_p_value,
)
from rlhf_testing.runs import tiny_run


def monitor_of(options: MonitorConfig, episodes: int = 100) -> HackingMonitor:
    return HackingMonitor(options, HookContext(Path("run"), {"train": {"episodes": episodes}}))


def watched(honest: list[float], trained: list[float], episodes: int = 100, **options: Any) -> int | None:
    """Return the episode of the first alarm."""
    monitor = monitor_of(MonitorConfig(action="finish", **options), episodes)
    for episode, (reward, score) in enumerate(zip(trained, honest, strict=True)):
        metrics = {"reward/mean": reward, "eval/score": score}
        action = monitor.rlhf_decide(moment=Moment(at="episode", step=episode, episode=episode, metrics=metrics))
        if action is not None:
            assert action.kind == "finish" and "p = " in action.reason
            return episode
    return None


def curve(draw: random.Random, start: float, slope: float, noise: float = 0.05, memory: float = 0.0) -> list[float]:
    """A line with noise, of which `memory` is kept from one episode to the next."""
    values, kept = [], draw.gauss(0, noise)
    for step in range(100):
        values.append(start + slope * step / 100 + kept)
        kept = memory * kept + math.sqrt(1 - memory**2) * draw.gauss(0, noise)
    return values


def test_a_trend_is_not_more_certain_than_by_the_exact_distribution() -> None:
    """All orders of seven values, each as likely as another (Kendall 1975)."""
    found = [trend_p_value(order) for order in itertools.permutations(range(7))]
    for p in (0.1, 0.05, 0.02):
        assert 0 < sum(each <= p for each in found) / len(found) <= p
    assert trend_p_value([1.0] * 9) == 1.0
    assert trend_p_value([5, 4, 3, 2, 1]) > 0.9


def test_a_higher_sample_is_that_of_the_exact_distribution() -> None:
    """All 252 divisions of ten values into two samples of five."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    chosen = [list(each) for each in itertools.combinations(values, 5)]
    for last in chosen[::25]:
        first = [value for value in values if value not in last]
        exact = sum(sum(other) >= sum(last) for other in chosen) / len(chosen)
        assert higher_p_value(first, last) == pytest.approx(exact, abs=0.02)
    assert higher_p_value([1.0] * 5, [1.0] * 5) == 1.0


def test_memory_makes_a_trend_less_significant() -> None:
    draw = random.Random(0)
    values = curve(draw, 0.0, 0.0, memory=0.9)
    apart = [value - sum(values) / 100 for value in values]
    slow = sum(one * other for one, other in itertools.pairwise(apart)) / sum(each**2 for each in apart)
    assert lag_1_autocorrelation(values) == pytest.approx(min((100 * slow + 1) / 96, 0.95))
    assert lag_1_autocorrelation(range(30)) > 0.8, "without a trend taken out"
    steps = [0.0] * 5 + [1.0] * 5
    assert trend_p_value([0.0, 1.0] * 3 + [2.0, 3.0] * 2) < trend_p_value(steps) < 0.5


def test_the_level_is_divided_by_all_tests_of_the_run() -> None:
    options = MonitorConfig(falls=["a", "b"], rises=["c"], window=20, p_value=0.01)
    assert num_tests(options, 100) == 2 * 3 * 17 and level(options, 100) == pytest.approx(0.01 / 102)
    assert num_tests(options, 19) == 0


def false_alarms(number: int, memory: float) -> int:
    """Runs whose watched value has no trend, or rises, while the reward rises."""
    alarms = 0
    for seed in range(number):
        draw = random.Random(seed)
        slope = (0.4, 0.0, 0.0)[seed % 3]
        honest = curve(draw, 0.3, slope, memory=memory)
        alarms += watched(honest, curve(draw, 0.2, 0.5, memory=memory)) is not None
    return alarms


@pytest.mark.parametrize("memory", [0.0, 0.3, 0.6])
def test_false_alarms_are_as_frequent_as_they_may_be(memory: float) -> None:
    """3 of 300 runs are expected at the p-value 0.01. 6 is 2 standard deviations (of a sum of 300) more."""
    assert false_alarms(300, memory) <= 6


@pytest.mark.parametrize("memory", [0.0, 0.3, 0.6])
def test_a_lower_mean_is_found_at_most_at_the_stated_probability(memory: float) -> None:
    draw = random.Random(0)
    curves = [curve(draw, 1.0, 0.0, memory=memory) for _ in range(3000)]
    found = [lower_p_value(each[:5], each[50:60]) for each in curves]
    for p in (0.01, 0.001):
        assert sum(each < p for each in found) / len(found) <= p


def test_student_is_that_of_tables() -> None:
    tables = {1: 6.314, 2: 2.920, 3: 2.353, 10: 1.812, 18: 1.734, 120: 1.658}
    for degrees, t in tables.items():
        assert student_p_value(t, degrees) == pytest.approx(0.05, abs=1e-4)
        assert student_p_value(-t, degrees) == pytest.approx(0.95, abs=1e-4)
    assert student_p_value(3.250, 9) == pytest.approx(0.005, abs=1e-5)


def test_equal_values_are_not_without_noise() -> None:
    assert lower_p_value([1.0] * 5, [1.0] * 10) == 0.5 and lower_p_value([0.0] * 5, [0.0] * 10) == 1.0
    assert lower_p_value([1.0] * 5, [0.0] * 10) < 1e-6 and lower_p_value([0.0] * 5, [1.0] * 10) > 0.99
    assert lower_p_value([0.5] * 5, [0.484] * 10) > 0.05, "one of 64 prompts"


def test_a_falling_key_without_a_rising_reward_gives_no_alarm() -> None:
    draw = random.Random(0)
    assert watched(curve(draw, 0.5, -0.5), curve(draw, 0.5, 0.0)) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_hack_is_found(seed: int) -> None:
    """The score falls from episode 40 on, while the trained reward rises on."""
    draw = random.Random(seed)
    honest = [value - max(0, step - 40) * 0.01 for step, value in enumerate(curve(draw, 0.5, 0.1, 0.02))]
    found = watched(honest, curve(draw, 0.2, 0.5, 0.02))
    assert found is not None and 40 < found < 75


@pytest.mark.parametrize("memory", [0.0, 0.3])
def test_a_sudden_fall_is_found(memory: float) -> None:
    """The score falls from 0.58 to 0 within an episode, and no trend follows."""
    found = []
    for seed in range(20):
        draw = random.Random(seed)
        honest = [value if step < 40 else 0.0 for step, value in enumerate(curve(draw, 0.58, 0.0, memory=memory))]
        found.append(watched(honest, curve(draw, 0.2, 0.5, memory=memory)))
    assert all(each is None or each >= 40 for each in found)
    assert sum(each is not None and each < 60 for each in found) == 20


def test_a_score_that_falls_from_the_first_episode_on_is_found() -> None:
    """The run of `benchmarks/hacking_monitor.py` whose rule accepts any ascending digits."""
    score = [0.58, 0.5, 0.39, 0.23, 0.09, 0.02, *[0.0] * 34]
    reward = [0.6, 0.73, 0.82, 0.81, 0.88, 0.85, 0.89, 0.92, 0.91, *[0.98] * 31]
    options = {"falls": ["eval/score"], "rises": ["response/length_mean"]}
    assert watched(score, reward, episodes=40, **options) == 19


def test_a_key_that_should_not_rise_and_a_resume() -> None:
    options = MonitorConfig(falls=[], rises=["response/length_mean"], window=20, action="pause")
    monitor, actions = monitor_of(options, 30), []
    for episode in range(28):
        metrics = {"reward/mean": episode / 10, "response/length_mean": 20.0 + episode}
        action = monitor.rlhf_decide(moment=Moment(at="episode", step=0, episode=episode, metrics=metrics))
        actions.append(action and action.kind)
        again = monitor_of(options, 30)
        again.load_state_dict(monitor.state_dict())
        monitor = again
    assert actions == [None] * 19 + ["pause"] + [None] * 8, "once, although the trend continues"


def test_a_run_reports_a_length_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trained reward pays for short answers; the watched one, of weight 0, for long ones."""
    run = tiny_run(
        {
            "algorithm": {"name": "grpo", "kl_coef": 0},
            "rewards": [
                {"name": "length", "target_tokens": 1, "shape": "at-most", "label": "short"},
                {"name": "length", "target_tokens": 8, "shape": "at-least", "label": "long", "weight": 0},
            ],
            "engine": {"max_new_tokens": 8},
            "optimizer": {"lr": 5e-3},
            "train": {"episodes": 16, "prompts_per_episode": 8, "samples_per_prompt": 4, "train_batch_size": 32},
            "hooks": {"hacking-monitor": {"falls": ["reward/long"], "window": 10, "p_value": 0.05, "action": "finish"}},
        }
    )
    with caplog.at_level(logging.WARNING, "rlhf"):
        result = train(run, output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    assert len(result.metrics) < 32, "the run was finished early"
    assert "reward/mean is higher than at the start" in caplog.text and "reward/long falls (p = " in caplog.text


def test_episodes_after_a_rollback_replace_the_earlier_ones() -> None:
    options = MonitorConfig(falls=["eval/score"], window=10)
    monitor, straight = monitor_of(options), monitor_of(options)

    def see(to: HackingMonitor, episode: int, score: float) -> None:
        metrics = {"reward/mean": episode / 10, "eval/score": score}
        to.rlhf_decide(moment=Moment(at="episode", step=episode, episode=episode, metrics=metrics))

    for episode in range(8):
        see(monitor, episode, -episode if episode > 4 else 1.0)
        if episode < 5:
            see(straight, episode, 1.0)
    for episode in range(5, 12):
        see(monitor, episode, 1.0)
        see(straight, episode, 1.0)
    assert monitor.state_dict() == straight.state_dict()


def test_a_key_that_does_not_exist_is_named(caplog: pytest.LogCaptureFixture) -> None:
    monitor = monitor_of(MonitorConfig(falls=["reward/exakt"]))
    with caplog.at_level(logging.WARNING, "rlhf"):
        for episode in range(2):
            metrics = {"reward/mean": 0.1, "reward/exact": 0.2}
            monitor.rlhf_decide(moment=Moment(at="episode", step=0, episode=episode, metrics=metrics))
    assert caplog.text.count("the first episode has no metric reward/exakt") == 1
    assert "reward/exact" in caplog.text.replace("reward/exakt", "")


def test_a_window_that_can_never_report_is_refused() -> None:
    run = tiny_run({"train": {"episodes": 5000}, "hooks": {"hacking-monitor": {"window": 10, "p_value": 0.001}}})
    with pytest.raises(ConfigError, match=r"window: no trend over 10 measurements is significant in 4992 tests"):
        train(run, dry_run=True)


def test_something_must_be_watched() -> None:
    with pytest.raises(ConfigError, match="needs a key in `falls` or `rises`"):
        train(tiny_run({"hooks": {"hacking-monitor": {"falls": []}}}), dry_run=True)
