"""Rewards that fail in the middle of a run: it ends by name and keeps what was done, or goes on as the policy says."""

import json
from pathlib import Path

import pytest
from run_files import metrics, samples, start

from rlhf_core.errors import RewardError

pytestmark = pytest.mark.usefixtures("no_plots")

FILE = Path(__file__).with_name("faulty_run_rewards.py")
ISOLATED = {"isolate": True}
SMALL = ISOLATED | {"memory_limit_bytes": 300_000_000}
HURRIED = {"timeout_seconds": 1.0}

# Whole calls fail, so all 8 samples of the second episode do.
CALLS = {
    "raises": ({}, "raised KeyError: 'no such model'"),
    "wrong_count": ({}, "returned 7 values for 8 samples"),
    "hangs": (HURRIED, "gave no answer within 1 s"),
    "segfaults": (ISOLATED, "ended by SIGSEGV"),
    "allocates_without_end": (SMALL, "bytes of memory, more than its limit of 300,000,000"),
}
# Every other score is none, so 4 of 8 do.
SCORES = {
    "nan": ({}, "returned an invalid score: nan is not finite"),
    "infinity": ({}, "returned an invalid score: -inf is not finite"),
    "strings": ({}, "returned an invalid score: 'good' (str) is not a number"),
}
FAULTS = CALLS | SCORES
"""`test_scorer.py` and `test_isolated_rewards.py` have every fault in `make test`."""


def run_file(name, policy, **changes):
    reward = {"name": f"{FILE}:{name}", "label": "judge", **policy}
    return {"rewards": [reward], "checkpoint": {"every_episodes": 1}, **changes}


def check_folder(folder, episodes):
    """Whole episodes only: two updates and eight samples each, and one good checkpoint after each."""
    assert [line["episode"] for line in metrics(folder)] == [episode for episode in range(episodes) for _ in range(2)]
    assert sorted(each["sample_id"] for each in samples(folder)) == list(range(8 * episodes))
    kept = sorted(path.name for path in (folder / "checkpoints").glob("*") if path.name != "last")
    assert kept == [f"step-{2 * (episode + 1)}" for episode in range(episodes)]


@pytest.mark.slow_except("nan")
@pytest.mark.parametrize("name", FAULTS)
def test_the_run_ends_by_name_with_what_was_done_and_goes_on_with_the_reward_mended(tmp_path, name):
    policy, said = FAULTS[name]
    with pytest.raises(RewardError) as caught:
        start(run_file(name, policy), tmp_path / "run")
    assert caught.value.exit_code == 1
    for part in ('reward "judge": faulty_run_rewards.py', said, "at sample "):
        assert part in str(caught.value)
    check_folder(tmp_path / "run", episodes=1)
    assert not (tmp_path / "run" / "model").exists()
    mended = start(run_file("right", {}), tmp_path / "run", resume="auto")
    assert mended.summary["status"] == "done"
    check_folder(tmp_path / "run", episodes=2)


@pytest.mark.slow_except("hangs")
@pytest.mark.parametrize("name", FAULTS)
def test_the_run_survives_where_failures_score_0(tmp_path, name):
    policy, _ = FAULTS[name]
    result = start(run_file(name, policy | {"on_failure": "zero"}), tmp_path / "run")
    assert result.summary["status"] == "done"
    check_folder(tmp_path / "run", episodes=2)
    zeros = 4 if name in SCORES else 8
    assert sum(each["rewards"]["judge"] == 0.0 for each in samples(tmp_path / "run") if each["sample_id"] >= 8) >= zeros
    first, last = result.metrics[1], result.metrics[3]
    assert (first["reward_calls/judge/calls"], last["reward_calls/judge/zeroed"]) == (1, zeros)
    # An isolated call that a process did not survive is followed by one call for each of its answers.
    calls = 1 + zeros if policy.get("isolate") else 1
    assert last["reward_calls/judge/failures"] == (calls if name in CALLS else zeros)
    assert "reward_calls/judge/failures" not in first
    assert not [key for line in result.metrics[::2] for key in line if key.startswith("reward_calls/")]


@pytest.mark.slow_except("nan")
@pytest.mark.parametrize("name", SCORES)
def test_samples_without_a_score_may_be_left_out(tmp_path, name):
    result = start(run_file(name, {"on_failure": "drop"}), tmp_path / "run")
    assert result.summary["status"] == "done"
    assert [each["sample_id"] for each in samples(tmp_path / "run")] == [*range(8), 8, 10, 12, 14]
    assert result.metrics[-1]["reward_calls/judge/dropped"] == 4
    assert result.metrics[-1]["reward/judge"] == (8 + 0 + 2 + 4) / 4


def test_an_episode_of_which_nothing_is_left_is_an_error(tmp_path):
    with pytest.raises(RewardError, match="episode 1 lost all samples: on_failure dropped"):
        start(run_file("raises", {"on_failure": "drop"}), tmp_path / "run")
    check_folder(tmp_path / "run", episodes=1)


def test_a_slow_reward_only_takes_its_time(tmp_path):
    result = start(run_file("slow", {"batch_size": 2, "concurrency": 4}), tmp_path / "run")
    check_folder(tmp_path / "run", episodes=2)
    for line in result.metrics[1::2]:
        assert line["reward_calls/judge/calls"] == 4
        assert line["reward_calls/judge/seconds"] >= 4 * 0.05
        assert "reward_calls/judge/failures" not in line


def test_one_reward_of_several_is_named_and_nothing_is_half_written(tmp_path):
    rewards = [{"name": f"{FILE}:right"}, {"name": f"{FILE}:raises"}, {"name": f"{FILE}:hangs", **HURRIED}]
    with pytest.raises(RewardError, match='reward "raises"'):
        start({"rewards": rewards, "checkpoint": {"every_episodes": 1}}, tmp_path / "run")
    check_folder(tmp_path / "run", episodes=1)
    assert not list((tmp_path / "run").rglob(".partial*"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
