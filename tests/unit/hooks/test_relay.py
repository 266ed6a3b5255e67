from __future__ import annotations

import inspect
import logging
from types import ModuleType

import pytest

from rlhf_core.errors import DivergenceError, HookError, PluginError
from rlhf_core.hooks import HookRelay, spec_function
from rlhf_core.hookspecs import FitInfo, hookimpl


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    @hookimpl
    def rlhf_episode_start(self, episode):
        self.events.append(("start", episode))

    @hookimpl
    def rlhf_episode_end(self, episode, metrics, error):
        self.events.append(("end", (episode, metrics, error)))


def test_span_gives_the_end_the_same_arguments_and_what_was_set():
    relay, recorder = HookRelay(), Recorder()
    relay.register(recorder)
    with relay.span("episode", episode=3) as span:
        span.set("metrics", {"reward/mean": 1.0})
    assert recorder.events == [("start", 3), ("end", (3, {"reward/mean": 1.0}, None))]


@pytest.mark.parametrize("raised", [ValueError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_end_fires_with_the_error_of_the_block(raised):
    relay, recorder = HookRelay(), Recorder()
    relay.register(recorder)
    with pytest.raises(type(raised)), relay.span("episode", episode=0):
        raise raised
    assert recorder.events[-1] == ("end", (0, None, raised))


def test_end_fires_for_everyone_when_a_start_hook_raises():
    class Breaks:
        def rlhf_episode_start(self):
            raise RuntimeError("no")

    relay, recorder = HookRelay(), Recorder()
    relay.register(recorder)
    relay.register(Breaks(), name="breaks", distribution="rlhf-breaks 2.1")
    with pytest.raises(HookError) as caught, relay.span("episode", episode=0):
        pytest.fail("the block must not run")
    assert recorder.events[-1] == ("end", (0, None, caught.value))
    for part in ("breaks", "rlhf-breaks 2.1", "rlhf_episode_start", "RuntimeError: no"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_one_raising_end_does_not_keep_the_others_from_theirs():
    class Breaks:
        def rlhf_episode_end(self):
            raise RuntimeError("no")

    relay, first, last = HookRelay(), Recorder(), Recorder()
    relay.register(first, name="first")
    relay.register(Breaks())
    relay.register(last, name="last")
    with pytest.raises(HookError, match="Breaks.*rlhf_episode_end"), relay.span("episode", episode=0):
        pass
    assert first.events[-1][0] == last.events[-1][0] == "end"


def test_the_error_of_the_block_wins_and_that_of_the_hook_is_logged(caplog):
    class Breaks:
        def rlhf_episode_end(self):
            raise RuntimeError("hook trouble")

    relay = HookRelay()
    relay.register(Breaks())
    with caplog.at_level(logging.ERROR, "rlhf"), pytest.raises(KeyError), relay.span("episode", episode=0):
        raise KeyError("the cause")
    assert "hook trouble" in caplog.text


def test_an_rlhf_error_of_a_hook_keeps_its_type():
    class Guard:
        def rlhf_update_end(self, metrics):
            raise DivergenceError("loss is not finite", hint="lower optimizer.lr")

    relay = HookRelay()
    relay.register(Guard())
    with pytest.raises(DivergenceError, match=r"lower optimizer\.lr"), relay.span("update", step=1):
        pass


def test_wrappers_run_around_and_their_errors_are_named():
    class Wrapper:
        @hookimpl(wrapper=True)
        def rlhf_metrics(self, line):
            result = yield
            raise OSError("disk")
            return result

    relay = HookRelay()
    relay.register(Wrapper())
    with pytest.raises(HookError, match="Wrapper.*rlhf_metrics raised OSError: disk"):
        relay.fire("metrics", line={"step": 1})


def test_nested_spans_close_from_the_inside():
    order: list[str] = []

    class Order:
        def rlhf_epoch_end(self, error):
            order.append(f"epoch {error!r}")

        def rlhf_batch_end(self, error):
            order.append(f"batch {error!r}")

    relay = HookRelay()
    relay.register(Order())
    epoch = relay.span("epoch", episode=0, epoch=0)
    batch = relay.span("batch", episode=0, epoch=0, batch=0, experience=None)
    with pytest.raises(ValueError), epoch, batch:
        raise ValueError
    assert order == ["batch ValueError()", "epoch ValueError()"]


def test_modules_classes_and_unmarked_functions_are_plugins():
    seen = []
    module = ModuleType("my_hooks")
    module.rlhf_metrics = lambda line: seen.append(line["step"])
    relay = HookRelay()
    assert relay.register(module) == "my_hooks"
    relay.register(Recorder)
    relay.fire("metrics", line={"step": 7})
    assert seen == [7]
    assert set(relay.plugins) == {"my_hooks", "Recorder"}


def test_a_misspelt_hook_is_an_error_with_a_suggestion():
    class Wrong:
        def rlhf_epsiode_end(self):
            pass

    with pytest.raises(PluginError, match="did you mean rlhf_episode_end"):
        HookRelay().register(Wrong())


def test_an_argument_the_hook_does_not_have_is_an_error():
    class Wrong:
        def rlhf_episode_start(self, epsiode):
            pass

    with pytest.raises(PluginError, match="epsiode"):
        HookRelay().register(Wrong())


def test_an_object_without_hooks_is_an_error():
    with pytest.raises(PluginError, match="no hook"):
        HookRelay().register(object(), name="nothing")


def test_a_name_is_taken_once():
    relay = HookRelay()
    relay.register(Recorder(), name="one")
    with pytest.raises(PluginError, match="one"):
        relay.register(Recorder(), name="one")
    relay.register(Recorder())
    relay.register(Recorder())


def test_unknown_events_and_arguments_are_bugs():
    relay = HookRelay()
    with pytest.raises(KeyError, match="rlhf_nothing"), relay.span("nothing"):
        pass
    relay.register(Recorder())
    with pytest.raises(TypeError, match="missing \\['episode'\\]"), relay.span("episode"):
        pass


class Ordered:
    """Notes its name where it stands in a call, and adds it to a run file."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def changed(self, config):
        self.seen.append(self.name)
        return {**config, "by": [*config.get("by", []), self.name]}


class Plain(Ordered):
    def rlhf_transform_config(self, config):
        return self.changed(config)


class First(Ordered):
    @hookimpl(tryfirst=True)
    def rlhf_transform_config(self, config):
        return self.changed(config)


class Last(Ordered):
    @hookimpl(trylast=True)
    def rlhf_transform_config(self, config):
        return self.changed(config)


def test_transform_config_goes_from_one_to_the_next_in_pluggys_order():
    seen: list[str] = []
    relay = HookRelay()
    for plugin in (First("first", seen), Plain("older", seen), Last("last", seen), Plain("newer", seen)):
        relay.register(plugin, name=plugin.name)
    assert relay.transform_config({"lr": 4.0}) == {"lr": 4.0, "by": ["first", "newer", "older", "last"]}
    assert seen == ["first", "newer", "older", "last"]


@pytest.mark.parametrize("style", ["wrapper", "hookwrapper"])
def test_a_wrapper_of_transform_config_has_the_last_word(style: str):
    """It sees the answers of those inside, each a whole run file made from the one before."""
    seen: list[object] = []

    class New:
        @hookimpl(wrapper=True)
        def rlhf_transform_config(self, config):
            seen.append(dict(config))
            answers = yield
            seen.append(answers)
            return [*answers, {**answers[-1], "wrapped": True}]

    class Old:
        @hookimpl(hookwrapper=True)
        def rlhf_transform_config(self, config):
            seen.append(dict(config))
            outcome = yield
            seen.append(outcome.get_result())
            outcome.force_result([{**outcome.get_result()[-1], "wrapped": True}])

    relay, order = HookRelay(), []
    relay.register({"wrapper": New, "hookwrapper": Old}[style]())
    for name in ("older", "newer"):
        relay.register(Plain(name, order), name=name)
    assert relay.transform_config({"lr": 1.0}) == {"lr": 1.0, "by": ["newer", "older"], "wrapped": True}
    assert seen == [{"lr": 1.0}, [{"lr": 1.0, "by": ["newer"]}, {"lr": 1.0, "by": ["newer", "older"]}]]
    assert order == ["newer", "older"]


def test_a_wrapper_of_transform_config_may_answer_with_a_run_file():
    class Wrapper:
        @hookimpl(wrapper=True)
        def rlhf_transform_config(self, config):
            yield
            return {**config, "lr": 2.0}

    class Looks:
        @hookimpl(wrapper=True)
        def rlhf_transform_config(self, config):
            return (yield)

    class Leaves:
        @hookimpl(wrapper=True)
        def rlhf_transform_config(self, config):
            yield

    relay = HookRelay()
    for plugin in (Wrapper(), Looks(), Leaves()):
        relay.register(plugin)
    assert relay.transform_config({"lr": 1.0}) == {"lr": 2.0}


def test_answers_stay_a_list_whatever_a_wrapper_returns():
    class Answers:
        def rlhf_verdict(self, step):
            return step

    class Leaves:
        @hookimpl(wrapper=True)
        def rlhf_verdict(self):
            yield

    class Replaces:
        @hookimpl(wrapper=True)
        def rlhf_verdict(self):
            answers = yield
            return answers[0] + 1

    relay = HookRelay()
    relay.register(Answers())
    relay.register(Leaves())
    arguments = {"step": 7, "episode": 0, "metrics": {}, "error": None}
    assert relay.fire("verdict", **arguments) == [7]
    relay.register(Replaces())
    assert relay.fire("verdict", **arguments) == [8]


def test_transform_config_without_a_change_is_what_was_given():
    class Leaves:
        def rlhf_transform_config(self):
            return None

    relay = HookRelay()
    assert relay.transform_config({"lr": 4.0}) == {"lr": 4.0}
    relay.register(Leaves())
    assert relay.transform_config({"lr": 4.0}) == {"lr": 4.0}


def test_an_answer_that_is_no_run_file_is_named():
    class Wrong:
        def rlhf_transform_config(self):
            return 3

    class WrongWrapper:
        @hookimpl(wrapper=True)
        def rlhf_transform_config(self):
            yield
            return 3

    for plugin in (Wrong(), WrongWrapper()):
        relay = HookRelay()
        relay.register(plugin, name="wrong", distribution="rlhf-wrong 2.1")
        with pytest.raises(HookError, match=r"wrong.*rlhf-wrong 2\.1.*rlhf_transform_config returned int"):
            relay.transform_config({"lr": 4.0})


def _marked(seen: list[str], name: str, event: str, **mark: bool) -> object:
    """A plugin with one hook of one event, under pluggy's mark."""
    if mark.get("wrapper") or mark.get("hookwrapper"):

        def hook(self):
            seen.append(f"{name} before")
            result = yield
            seen.append(f"{name} after")
            return result
    else:

        def hook(self):
            seen.append(name)

    return type(name, (), {f"rlhf_{event}": hookimpl(**mark)(hook)})()


@pytest.mark.parametrize("event", sorted(HookRelay().events))
def test_every_hook_has_pluggys_order_and_wrappers(event: str):
    seen: list[str] = []
    relay = HookRelay()
    marks = {
        "first": {"tryfirst": True},
        "wrap": {"wrapper": True},
        "older": {},
        "last": {"trylast": True},
        "old-wrap": {"hookwrapper": True},
        "newer": {},
    }
    for name, mark in marks.items():
        relay.register(_marked(seen, name, event, **mark), name=name)
    if event == "transform_config":
        relay.transform_config({})
    else:
        names = [name for name in inspect.signature(spec_function(event)).parameters if name != "self"]
        relay.replay(event, dict.fromkeys(names))
    inside = ["first", "newer", "older", "last"]
    assert seen == ["old-wrap before", "wrap before", *inside, "wrap after", "old-wrap after"]


@pytest.mark.parametrize(
    "mark", [{}, {"wrapper": True}, {"hookwrapper": True}], ids=["plain", "wrapper", "hookwrapper"]
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("event", ["transform_config", "episode_start", "episode_end", "maker_loop_end", "verdict"])
@pytest.mark.filterwarnings("ignore::pluggy.PluggyTeardownRaisedWarning")
def test_who_raises_is_named_and_no_listener_of_an_end_is_left_out(event: str, when: str, mark: dict[str, bool]):
    seen: list[str] = []
    if mark:

        def hook(self):
            if when == "before":
                raise OSError("disk")
            yield
            raise OSError("disk")
    else:

        def hook(self):
            raise OSError("disk")

    relay = HookRelay()
    relay.register(_marked(seen, "inner", event), name="inner")
    breaks = type("Breaks", (), {f"rlhf_{event}": hookimpl(**mark)(hook)})()
    relay.register(breaks, name="breaks", distribution="rlhf-breaks 2.1")
    names = [name for name in inspect.signature(spec_function(event)).parameters if name != "self"]
    with pytest.raises(HookError) as caught:
        if event == "transform_config":
            relay.transform_config({})
        else:
            relay.replay(event, dict.fromkeys(names))
    assert "hook plugin 'breaks' (rlhf-breaks 2.1)" in str(caught.value)
    assert f"rlhf_{event} raised OSError: disk" in str(caught.value)
    if event.endswith("_end"):
        assert seen == ["inner"]


@pytest.mark.parametrize(("yields", "complaint"), [(0, "did not yield"), (2, "yielded twice")])
@pytest.mark.parametrize("style", ["wrapper", "hookwrapper"])
@pytest.mark.filterwarnings("ignore::pluggy.PluggyTeardownRaisedWarning")
def test_a_wrapper_that_does_not_yield_once_is_named(style: str, yields: int, complaint: str):
    class Wrong:
        @hookimpl(**{style: True})
        def rlhf_metrics(self):
            for _ in range(yields):
                yield

    relay = HookRelay()
    relay.register(Wrong(), distribution="rlhf-wrong 2.1")
    with pytest.raises(HookError, match=rf"Wrong.*rlhf-wrong 2\.1.*rlhf_metrics.*{complaint}"):
        relay.fire("metrics", line={})


def test_arguments_with_a_default_are_given_too():
    seen = []

    class Listener:
        def rlhf_episode_end(self, episode, metrics=None, error=None):
            seen.append((episode, metrics))

    relay = HookRelay()
    relay.register(Listener())
    with relay.span("episode", episode=3) as span:
        span.set("metrics", {"a": 1.0})
    assert seen in ([(3, {"a": 1.0})], [(3, None)])


def test_unregister_stops_listening():
    relay = HookRelay()
    name = relay.register(Recorder())
    assert relay.listens("episode_end")
    relay.unregister(name)
    assert not relay.listens("episode_end")


def test_every_start_has_its_end_with_an_error_and_the_same_arguments():
    events = HookRelay().events
    for event in sorted(event for event in events if event.endswith("_start")):
        start = inspect.signature(spec_function(event)).parameters
        end = inspect.signature(spec_function(event.removesuffix("_start") + "_end")).parameters
        assert set(start) <= set(end)
        assert "error" in end
    assert {event.removesuffix("_end") for event in events if event.endswith("_end")} == {
        event.removesuffix("_start") for event in events if event.endswith("_start")
    }


def test_fit_info_is_passed_whole():
    seen = []

    class Listener:
        def rlhf_fit_start(self, info):
            seen.append(info.num_episodes)

    relay = HookRelay()
    relay.register(Listener())
    with relay.span("fit", info=FitInfo(algorithm="ppo", num_episodes=4)):
        pass
    assert seen == [4]


def test_every_hook_is_documented():
    assert [event for event in HookRelay().events if not inspect.getdoc(spec_function(event))] == []
