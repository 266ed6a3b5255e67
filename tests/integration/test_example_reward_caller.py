"""The reward caller of docs/rewards.md; and a run that needs a caller that is not installed."""

import re
import tomllib
from pathlib import Path

import pytest
from faulty_rewards import make_rollout
from faulty_rewards import right as right_scores

from rlhf_core.config import RewardCallOptions, resolve_reward
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins import discovery
from rlhf_core.rewards import RewardScorer, RewardSpec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"```python\n# (acme_\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def ledger(install):
    points = tomllib.loads(re.search(r"```toml\n(\[project\]\n.*?)```", PAGE, re.DOTALL)[1])["project"]["entry-points"]
    install("acme-ledger", points, SOURCES)


def spec(**options):
    return RewardSpec(name="right", function=right_scores, call_options=RewardCallOptions(**options))


@pytest.mark.parametrize("isolate", [False, True])
def test_the_caller_of_the_page_records_every_call(ledger, isolate):
    scorer = RewardScorer([spec(batch_size=2, isolate=isolate)])
    try:
        assert scorer.score([make_rollout(index) for index in range(3)]) == [{"right": float(n)} for n in range(3)]
        costs = scorer.take_metrics()
    finally:
        scorer.close()
    assert (costs["reward_calls/right/calls"], costs["reward_calls/right/answers"]) == (2, 3)


@pytest.fixture
def without_callers(monkeypatch):
    installed = discovery._installed()
    without = {kind: refs for kind, refs in installed.items() if kind != "reward_callers"}
    monkeypatch.setattr(discovery, "_installed", lambda: without)


@pytest.mark.parametrize(("name", "key"), [("length", "isolate"), ("math-equivalence", None)])
def test_a_run_that_needs_one_that_is_missing_is_refused_before_it_starts(without_callers, name, key):
    with pytest.raises(ConfigError, match=f'no reward caller "{key or "isolate"}" is installed') as raised:
        resolve_reward({"name": name} | ({key: True} if key else {}), "the run file")
    assert "pip install rlhf-containment" in str(raised.value)
    with pytest.raises(PluginError, match="no reward caller"):
        RewardScorer([spec(**{key or "isolate": True})])


def test_other_rewards_do_without(without_callers):
    assert resolve_reward({"name": "math-equivalence", "isolate": False}, "the run file")


def test_what_is_not_a_caller_is_named(install):
    install("acme-ledger", {"rlhf.reward_callers": {"ledger": "acme_ledger:Ledger"}}, {"acme_ledger": "Ledger = int\n"})
    with pytest.raises(PluginError, match="acme_ledger:Ledger is not a subclass of RewardCaller"):
        RewardScorer([spec()])
