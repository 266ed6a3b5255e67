"""What a trainer process saves is what it brings back, and a checkpoint that cannot be written leaves none."""

import errno
from types import SimpleNamespace

import pytest

from rlhf_core.components import StrategyContext
from rlhf_core.config.sections import CheckpointConfig
from rlhf_core.errors import CheckpointError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.rewards.scorer import RewardCombiner
from rlhf_core.runfolder.checkpoint_state import RunState
from rlhf_core.runfolder.checkpoints import CheckpointStore
from rlhf_core.training.checkpoint_saver import CheckpointSaver


class Counting:
    """As an algorithm and as a channel: one number that must survive."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

    def states(self):
        return []


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def alone():
    """A strategy of one process."""
    from rlhf_torch.config import SingleConfig
    from rlhf_torch.single import SingleStrategy

    return SingleStrategy(SingleConfig(), StrategyContext(device="cpu"))


@pytest.fixture
def make_saver(store):
    def make(algorithm=None, channel=None, **config):
        run = SimpleNamespace(
            resolved=SimpleNamespace(
                run=SimpleNamespace(checkpoint=CheckpointConfig.model_validate(config)), rolls_out=True
            ),
            strategy=alone(),
            trained={},
            inputs=SimpleNamespace(algorithm=algorithm or Counting()),
        )
        combiner = RewardCombiner({"score": 1.0}, clip=None, normalise=False)
        return CheckpointSaver(run, store, combiner, hooks=HookRelay(), makers=channel)

    return make


def state(step, algorithm=0):
    return RunState(
        step=step,
        next_episode=step // 2,
        policy_version=step,
        eval_before=0.25,
        algorithm={"value": algorithm},
        combiner=RewardCombiner({"score": 1.0}, clip=None, normalise=False).state_dict(),
        wall_s=1.5,
    )


def test_what_was_saved_is_brought_back_and_what_came_later_is_removed(make_saver, store):
    saver = make_saver(channel=Counting(7))
    saver.save(state(4, algorithm=3))
    saver.save(state(6, algorithm=5))
    assert store.steps() == [4, 6]
    algorithm, channel = Counting(), Counting()
    loaded = make_saver(algorithm, channel).load(store.path(4))
    assert loaded == state(4, algorithm=3)
    assert (algorithm.value, channel.value) == (3, 7)
    assert store.steps() == [4]


def test_a_full_disk_leaves_no_checkpoint(make_saver, store, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlhf_core.training.checkpoint_saver.save_run_state", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        make_saver().save(state(4))
    assert store.steps() == []
    assert not list(store.path(4).parent.iterdir())


@pytest.mark.parametrize(("best_is", "better", "worse"), [("highest", 0.6, 0.4), ("lowest", 0.4, 0.6)])
def test_the_best_is_known_after_a_resume(make_saver, store, best_is, better, worse):
    options = {"best": "eval/score", "best_is": best_is}
    saver = make_saver(**options)
    assert saver.improves({"eval/score": 0.5}) == 0.5
    saver.save(state(2), best_value=0.5)
    resumed = make_saver(**options)
    resumed.load(store.path(2))
    assert resumed.improves({"eval/score": worse}) is None
    assert resumed.improves({"eval/score": 0.5}) is None
    assert resumed.improves({"eval/score": float("nan")}) is None
    assert resumed.improves({}) is None
    assert resumed.improves({"eval/score": better}) == better


def test_the_best_is_kept_beside_the_newest(make_saver, store):
    saver = make_saver(best="eval/score")
    saver.save(state(2), best_value=0.5)
    for step in (4, 6, 8):
        saver.save(state(step))
    assert store.steps() == [2, 6, 8]


def test_the_last_good_one_is_from_before_the_episode_that_went_wrong(make_saver, store):
    saver = make_saver()
    assert saver.last_good(1) is None
    saver.save(state(4))  # the next episode is 2
    saver.save(state(6))  # the next episode is 3
    assert saver.last_good(3) == store.path(4)
    assert saver.last_good(4) == store.path(6)
    assert saver.last_good(1) == store.path(4)


class Makers(Counting):
    given = None

    def states(self):
        return [{"rewards": {"length": {"calls": 3}}, "players": {"player": {"best": {"seen": 2}}}}]

    def load_states(self, states):
        self.given = list(states)


def test_rewards_and_players_keep_a_state_and_older_checkpoints_have_that_of_rewards(make_saver):
    makers = Makers()
    saver = make_saver(channel=makers)
    kept = saver.plugin_state()
    assert kept == {"makers": makers.states()}
    saver.load_plugin_state(kept)
    assert makers.given == makers.states()
    saver.load_plugin_state({"rewards": [{"length": {"calls": 3}}]})
    assert makers.given == [{"rewards": {"length": {"calls": 3}}}]
