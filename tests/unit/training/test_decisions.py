"""What hook plugins decide is done by all ranks alike."""

import pytest

from rlhf_core.config import resolve
from rlhf_core.errors import DivergenceError, GuardStop, UserInputError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import Action, Moment
from rlhf_core.runfolder.checkpoint_state import RunState
from rlhf_core.training import decisions
from rlhf_core.training.decisions import DECISION, ROLLBACK, Decisions, RollBack
from rlhf_testing.runs import tiny_run
from rlhf_testing.thread_ranks import Ranks


def action(kind, by="mine", **options):
    return Action(kind=kind, by=by, reason=f"{by} says {kind}", **options)


def moment(at="update", step=7, episode=2, **facts):
    return Moment(at=at, step=step, episode=episode, metrics={}, **facts)


class Says:
    """A hook plugin that always gives the same answer, but for a paused run."""

    def __init__(self, *actions, paused=()):
        self.actions, self.paused, self.heard = actions, list(paused), []

    def rlhf_decide(self, moment):
        self.heard.append(moment.at)
        if moment.at == "paused":
            return self.paused.pop(0)
        return self.actions[0] if len(self.actions) == 1 else self.actions


@pytest.fixture
def values():
    return []


@pytest.fixture
def make(folder, make_rank, values):
    resolved = resolve(tiny_run())

    def make(*plugins, rank=None, interrupted=lambda: False):
        hooks = HookRelay()
        for plugin in plugins:
            hooks.register(plugin)

        def set_option(key, value):
            if key != "optimizer.lr":
                raise UserInputError("cannot be set to that", where=key)
            values.append(value)
            return f"lr is {value:g}"

        return Decisions(rank or make_rank(), hooks, resolved, folder, set_option, interrupted)

    return make


def test_nobody_decides_anything(make, folder):
    decided = make()
    assert not decided.take(moment())
    assert not (decided.interrupted or decided.checkpoint_requested or decided.finished or decided.may_roll_back())
    assert folder.events(DECISION) == []


def test_a_skip_leaves_out_the_rest_of_the_episode(make, caplog):
    assert make(Says(action("skip"))).take(moment())
    assert "guard mine, update 7: mine says skip; the rest of episode 3 is skipped" in caplog.text


def test_a_finish_leaves_it_out_too_and_is_kept(make):
    decided = make(Says(action("finish")))
    assert decided.take(moment())
    assert (decided.finished.by, decided.finished.reason) == ("mine", "mine says finish")


def test_the_gravest_of_several_answers_counts(make):
    plugins = [Says(action("skip", "a")), Says(action("finish", "b"), action("stop", "c")), Says(action("rollback"))]
    with pytest.raises(GuardStop, match=r"c says stop \(update 7, episode 3\)"):
        make(*plugins).take(moment())


def test_the_others_are_all_done_before_it(make, values):
    asked = [action("stop"), action("set", key="optimizer.lr", value=1e-6), action("checkpoint"), action("interrupt")]
    decided = make(Says(*asked))
    with pytest.raises(GuardStop):
        decided.take(moment())
    assert values == [1e-6] and decided.checkpoint_requested and decided.interrupted


def test_what_is_done_is_logged_and_noted(make, folder, caplog):
    make(Says(action("set", key="optimizer.lr", value=1e-6))).take(moment())
    (event,) = folder.events(DECISION)
    assert (event["by"], event["action"], event["reason"]) == ("mine", "set", "mine says set")
    assert (event["answer"], event["step"], event["episode"]) == ("lr is 1e-06", 7, 2)
    assert "mine: mine says set, after update 7: lr is 1e-06" in caplog.text


def test_what_is_refused_is_answered_and_the_run_goes_on(make, folder):
    answers = []
    asked = action("set", key="optimizer.critic_lr", value=1.0, answer=lambda *answer: answers.append(answer))
    make(Says(asked)).take(moment())
    ((text, refused),) = answers
    assert refused and "cannot be set to that" in text
    assert folder.events(DECISION) == []  # who is answered notes it himself


def test_an_interrupt_is_noted_even_if_it_is_answered(make, folder):
    answers = []
    make(Says(action("interrupt", answer=lambda *answer: answers.append(answer)))).take(moment())
    assert len(answers) == 1 and [event["action"] for event in folder.events(DECISION)] == ["interrupt"]


@pytest.mark.parametrize("options", [{}, {"key": "optimizer.lr"}, {"key": "optimizer.lr", "value": float("nan")}])
def test_a_set_needs_a_key_and_a_value(options):
    with pytest.raises(ValueError, match="needs a key and a value of 0 or more"):
        action("set", **options)


@pytest.mark.parametrize("ending", [action("resume"), action("interrupt")])
def test_a_paused_run_does_what_it_is_asked_until_it_goes_on(make, values, monkeypatch, ending):
    waits = []
    monkeypatch.setattr(decisions.time, "sleep", waits.append)
    plugin = Says(action("pause"), paused=[None, action("set", key="optimizer.lr", value=1.0), ending])
    decided = make(plugin)
    decided.take(moment())
    assert values == [1.0] and len(waits) == 3
    assert plugin.heard == ["update", "paused", "paused", "paused"]
    assert decided.interrupted == (ending.kind == "interrupt")


def test_a_signal_ends_a_pause(make, monkeypatch):
    waits = []
    monkeypatch.setattr(decisions.time, "sleep", waits.append)
    decided = make(Says(action("pause"), paused=[None] * 9), interrupted=lambda: len(waits) == 2)
    decided.take(moment())
    assert decided.interrupted and len(waits) == 2


def test_a_rollback_carries_where_it_was_asked_for(make):
    with pytest.raises(RollBack) as raised:
        make(Says(action("rollback"))).take(moment())
    assert (raised.value.moment, raised.value.action.by) == (moment(), "mine")


@pytest.mark.parametrize("plugins", [[], [Says(action("stop"))], [Says(action("finish"))]])
def test_a_failed_update_is_an_error_unless_a_hook_decides_otherwise(make, plugins):
    error = DivergenceError("not finite")
    with pytest.raises(DivergenceError, match="not finite") as raised:
        make(*plugins).take(moment("failed-update", error=error))
    assert raised.value is error


def test_a_failed_update_may_be_skipped_or_rolled_back(make):
    error = DivergenceError("the gradient is inf")
    assert not make(Says(action("skip"))).take(moment("failed-update", error=error))
    with pytest.raises(RollBack) as raised:
        make(Says(action("rollback"))).take(moment("failed-update", error=error))
    assert raised.value.__cause__ is error


def test_another_rank_does_what_rank_0_was_told_and_asks_nobody(make, make_rank, values, folder):
    said = [[action("set", key="optimizer.lr", value=2.0), action("stop", "kl")]]
    with pytest.raises(GuardStop, match="kl says stop"):
        make(rank=make_rank(rank=1, num_processes=2, said=said)).take(moment())
    assert values == [2.0] and folder.events(DECISION) == []
    assert not make(Says(action("stop")), rank=make_rank(rank=1, num_processes=2)).take(moment())


@pytest.mark.parametrize("kind", ["skip", "finish", "rollback", "stop", "interrupt", "checkpoint", "set", "pause"])
def test_two_ranks_do_the_same(make, values, kind, monkeypatch):
    monkeypatch.setattr(decisions.time, "sleep", lambda seconds: None)
    options = {"key": "optimizer.lr", "value": 3.0} if kind == "set" else {}
    answered = []

    def work(rank, strategy):
        asked = action(kind, answer=lambda *answer: answered.append(answer), **options)
        plugin = Says(asked, paused=[None, action("resume")])
        decided = make(plugin, rank=strategy)
        try:
            skips = decided.take(moment())
        except (GuardStop, RollBack) as error:
            return type(error), str(error), plugin.heard
        return skips, decided.finished, decided.interrupted, decided.checkpoint_requested, plugin.heard

    first, second = Ranks(2).run(work)
    assert first[:-1] == second[:-1]
    assert (first[-1], second[-1]) == (["update", "paused", "paused"] if kind == "pause" else ["update"], [])
    assert values == ([3.0, 3.0] if kind == "set" else [])
    assert len(answered) == (kind in ("interrupt", "checkpoint", "set", "pause"))


def test_a_signal_to_any_rank_is_heard_by_all(make):
    def work(rank, strategy):
        decided = make(rank=strategy, interrupted=lambda: rank == 1)
        decided.take(moment("episode"))
        return decided.interrupted

    assert Ranks(2).run(work) == [True, True]


def test_a_plugin_that_may_roll_back_says_so(make):
    plugin = Says(action("skip"))
    plugin.may_roll_back = True
    assert make(plugin).may_roll_back()


def test_rollbacks_are_counted_bounded_and_told(make, folder, tmp_path):
    decided = make()
    request = RollBack(action("rollback", "kl", max_times=1), moment())
    with pytest.raises(GuardStop, match="kl says rollback, and there is no complete checkpoint"):
        decided.allow_rollback(request, None)
    assert decided.rollbacks == 0
    decided.allow_rollback(request, tmp_path)
    state = RunState(
        step=4, next_episode=1, policy_version=1, eval_before=None, algorithm={}, combiner={}, wall_s=0.0
    )  # fmt: skip
    decided.log_rollback(request, state, {"policy": 0.5})
    (event,) = folder.events(ROLLBACK)
    assert (event["guard"], event["from_step"], event["to_step"], event["lr_factors"]) == ("kl", 7, 4, {"policy": 0.5})
    with pytest.raises(GuardStop, match="it was rolled back 1 times"):
        decided.allow_rollback(request, tmp_path)
