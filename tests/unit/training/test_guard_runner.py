"""What guards ask for is done by all ranks alike."""

import pytest

from rlhf_core.config import resolve
from rlhf_core.errors import DivergenceError, GuardStop
from rlhf_core.guards import GuardsConfig
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import Verdict
from rlhf_core.runfolder.checkpoint_state import RunState
from rlhf_core.testing.runs import tiny_run
from rlhf_core.training.guard_runner import ROLLBACK, GuardRunner, RollBack
from rlhf_core.training.loop import EpisodeBatches


class Says:
    """A guard that always gives the same answer."""

    def __init__(self, action, guard="mine"):
        self._verdict = Verdict(action=action, guard=guard, reason=f"{guard} says {action}")

    def rlhf_verdict(self, step, episode, metrics, error):
        return self._verdict


@pytest.fixture
def make_runner(folder, make_rank):
    def make(*guards, rank=None, config=None):
        hooks = HookRelay()
        for guard in guards:
            hooks.register(guard)
        resolved = resolve(tiny_run({"guards": (config or GuardsConfig()).model_dump(mode="json")}))
        return GuardRunner(rank or make_rank(), hooks, resolved, folder)

    return make


class Source:
    """Two epochs of three batches an episode."""

    def episode(self, index):
        return EpisodeBatches(([10 * epoch + batch for batch in range(3)] for epoch in range(2)), {})


def trained_on(runner, source, episode, after):
    """The batches of an episode, where `after` is called with each."""
    taken = []
    for epoch in source.episode(episode).epochs:
        for batch in epoch:
            taken.append(batch)
            after(batch)
    return taken


def test_a_skip_ends_the_episode_and_not_the_next_one(make_runner):
    runner = make_runner(Says("skip"))
    source = runner.watch(Source())
    assert trained_on(runner, source, 0, lambda batch: runner.after_update(1, 0, {})) == [0]
    assert trained_on(runner, source, 1, lambda batch: None) == [0, 1, 2, 10, 11, 12]


def test_the_gravest_of_several_answers_counts(make_runner):
    runner = make_runner(Says("skip", "a"), Says("stop", "b"), Says("rollback", "c"))
    with pytest.raises(GuardStop, match=r"b says stop \(update 7, episode 3\)"):
        runner.after_update(7, 2, {})


def test_a_rollback_carries_where_it_was_asked_for(make_runner):
    with pytest.raises(RollBack) as raised:
        make_runner(Says("rollback")).after_update(7, 2, {})
    assert (raised.value.step, raised.value.episode, raised.value.verdict.guard) == (7, 2, "mine")


def test_nobody_asked_for_anything(make_runner):
    make_runner().after_update(1, 0, {"kl/mean": 0.1})


@pytest.mark.parametrize("guards", [[], [Says("stop")]])
def test_a_failed_update_is_an_error_unless_a_guard_says_otherwise(make_runner, guards):
    error = ValueError("not finite")
    with pytest.raises(ValueError, match="not finite") as raised:
        make_runner(*guards).after_failed_update(1, 0, {}, error)
    assert raised.value is error


def test_a_failed_update_may_be_skipped_or_rolled_back(make_runner):
    error = DivergenceError("the gradient is inf")
    ours = GuardsConfig.model_validate({"non_finite": {"action": "skip"}})
    assert make_runner(config=ours).after_failed_update(1, 0, {}, error).args == ("the gradient is inf",)
    other = ValueError("not finite")
    with pytest.raises(RollBack) as raised:
        make_runner(Says("rollback")).after_failed_update(1, 0, {}, other)
    assert raised.value.__cause__ is other


def test_another_rank_does_what_rank_0_was_told(make_runner, make_rank):
    verdict = Verdict(action="stop", guard="kl", reason="kl/mean is 9")
    with pytest.raises(GuardStop, match="kl/mean is 9"):
        make_runner(rank=make_rank(rank=1, num_processes=2, said=[verdict])).after_update(1, 0, {})
    make_runner(Says("stop"), rank=make_rank(rank=1, num_processes=2)).after_update(1, 0, {})


def test_rollbacks_are_counted_bounded_and_told(make_runner, folder, tmp_path):
    runner = make_runner(config=GuardsConfig.model_validate({"rollback": {"max_times": 1}}))
    request = RollBack(Verdict(action="rollback", guard="kl", reason="too far"), step=7, episode=2)
    with pytest.raises(GuardStop, match="too far, and there is no whole checkpoint"):
        runner.allow_rollback(request, None)
    assert runner.rollbacks == 0
    runner.allow_rollback(request, tmp_path)
    state = RunState(
        step=4, next_episode=1, policy_version=1, eval_before=None, algorithm={}, combiner={}, wall_s=0.0
    )  # fmt: skip
    runner.tell_rollback(request, state, {"policy": 0.5})
    (event,) = folder.events(ROLLBACK)
    assert (event["guard"], event["from_step"], event["to_step"], event["lr_factors"]) == ("kl", 7, 4, {"policy": 0.5})
    with pytest.raises(GuardStop, match="it was rolled back 1 times"):
        runner.allow_rollback(request, tmp_path)
