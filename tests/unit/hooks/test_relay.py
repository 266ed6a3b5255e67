from __future__ import annotations

import inspect
import logging
from types import ModuleType

import pytest
from hook_specs import spec_function

from rlhf_core.errors import DivergenceError, HookError, PluginError
from rlhf_core.hooks.relay import HookRelay
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


def test_a_span_without_a_start_has_its_end():
    class Listener:
        def rlhf_update_end(self, step, error):
            seen.append((step, error))

    seen: list[object] = []
    relay = HookRelay()
    relay.register(Listener())
    with relay.span("update", step=3):
        assert seen == []
    assert seen == [(3, None)]


def test_an_argument_the_hook_does_not_have_is_an_error():
    class Wrong:
        def rlhf_episode_start(self, epsiode):
            pass

    with pytest.raises(PluginError, match="epsiode"):
        HookRelay().register(Wrong())


def test_an_object_without_hooks_is_an_error():
    with pytest.raises(PluginError, match="not define a hook"):
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


def test_every_start_has_its_end_with_an_error_and_the_same_arguments():
    events = HookRelay().events
    for event in sorted(event for event in events if event.endswith("_start")):
        start = inspect.signature(spec_function(event)).parameters
        end = inspect.signature(spec_function(event.removesuffix("_start") + "_end")).parameters
        assert set(start) <= set(end)
        assert "error" in end
    assert len(events) == 24


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
