"""The hook `hacking-monitor`: trends, false alarms, detection of planted hacks, and a run."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import ConfigError
from rlhf_core.hookspecs import Moment
from rlhf_guards.hacking_monitor import HackingMonitor, MonitorConfig, trend_p_value
from rlhf_testing.runs import tiny_run


def watched(honest: list[float], trained: list[float], **options: Any) -> int | None:
    """Return the episode of the first alarm."""
    monitor = HackingMonitor(MonitorConfig(action="finish", **options), None)  # type: ignore[arg-type]
    for episode, (reward, score) in enumerate(zip(trained, honest, strict=True)):
        metrics = {"reward/mean": reward, "eval/score": score}
        action = monitor.rlhf_decide(moment=Moment(at="episode", step=episode, episode=episode, metrics=metrics))
        if action is not None:
            assert action.kind == "finish" and "p = " in action.reason
            return episode
    return None


def curve(draw: random.Random, start: float, slope: float, noise: float = 0.05) -> list[float]:
    return [start + slope * step / 100 + draw.gauss(0, noise) for step in range(100)]


def test_a_trend_is_that_of_the_exact_distribution() -> None:
    """All 120 orders of five values: 1, 4, 9 of them have 0, 1, 2 pairs out of order (Kendall 1975, appendix)."""
    assert trend_p_value([1, 2, 3, 4, 5]) == pytest.approx(1 / 120, abs=0.01)
    assert trend_p_value([2, 1, 3, 4, 5]) == pytest.approx(5 / 120, abs=0.01)
    assert trend_p_value([1.0] * 9) == 1.0
    assert trend_p_value([5, 4, 3, 2, 1]) > 0.98


def test_honest_curves_give_no_alarm() -> None:
    """Both rise, only the trained one rises, or none: at most one alarm in thirty."""
    alarms = 0
    for seed in range(30):
        draw = random.Random(seed)
        slope = (0.4, 0.0, 0.1)[seed % 3]
        alarms += watched(curve(draw, 0.3, slope), curve(draw, 0.2, 0.5)) is not None
    assert alarms <= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_planted_hack_is_found(seed: int) -> None:
    """The score falls from episode 40 on, while the trained reward rises on."""
    draw = random.Random(seed)
    honest = [value - max(0, step - 40) * 0.01 for step, value in enumerate(curve(draw, 0.5, 0.1, 0.02))]
    found = watched(honest, curve(draw, 0.2, 0.5, 0.02))
    assert found is not None and 40 < found < 70


def test_a_key_that_should_not_rise_and_a_resume() -> None:
    options = MonitorConfig(falls=[], rises=["response/length_mean"], window=10, action="pause")
    monitor, actions = HackingMonitor(options, None), []  # type: ignore[arg-type]
    for episode in range(14):
        metrics = {"reward/mean": episode / 10, "response/length_mean": 20.0 + episode}
        action = monitor.rlhf_decide(moment=Moment(at="episode", step=0, episode=episode, metrics=metrics))
        actions.append(action and action.kind)
        again = HackingMonitor(options, None)  # type: ignore[arg-type]
        again.load_state_dict(monitor.state_dict())
        monitor = again
    assert actions == [None] * 9 + ["pause"] + [None] * 4, "once, although the trend continues"


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
            "train": {"episodes": 12, "prompts_per_episode": 8, "samples_per_prompt": 4, "train_batch_size": 32},
            "hooks": {"hacking-monitor": {"falls": ["reward/long"], "window": 8, "p_value": 0.01, "action": "finish"}},
        }
    )
    with caplog.at_level(logging.WARNING, "rlhf"):
        result = train(run, output=tmp_path / "run")
    assert result is not None and result.summary["status"] == "done"
    assert len(result.metrics) < 12, "the run was finished early"
    assert "reward/mean rises and reward/long falls" in caplog.text


def test_something_must_be_watched() -> None:
    with pytest.raises(ConfigError, match="needs a key in `falls` or `rises`"):
        train(tiny_run({"hooks": {"hacking-monitor": {"falls": []}}}), dry_run=True)
