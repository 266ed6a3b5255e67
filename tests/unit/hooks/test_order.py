"""Order and wrappers of every hook are pluggy's, and whoever raises is named."""

from __future__ import annotations

import inspect

import pytest
from hook_specs import spec_function

from rlhf_core.entry.train import train
from rlhf_core.errors import ConfigError, HookError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import Action, hookimpl


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


@pytest.mark.parametrize(("event", "returned"), [("transform_config", {"lr": 2.0}), ("decide", None)])
def test_a_wrapper_that_returns_no_list_of_answers_is_named(event: str, returned: object):
    def hook(self):
        yield
        return returned

    relay = HookRelay()
    relay.register(type("Wraps", (), {f"rlhf_{event}": hookimpl(wrapper=True)(hook)})())
    with pytest.raises(HookError, match=rf"Wraps.*: rlhf_{event} returned {type(returned).__name__}"):
        fire(relay, event)


def test_a_wrapper_of_decide_may_add_an_answer():
    skip, stop = (Action(kind=kind, by="mine", reason="says the test") for kind in ("skip", "stop"))

    class Answers:
        def rlhf_decide(self, moment):
            return skip

    class Adds:
        @hookimpl(wrapper=True)
        def rlhf_decide(self):
            answers = yield
            return [*answers, stop]

    relay = HookRelay()
    relay.register(Answers())
    assert relay.fire("decide", moment=None) == [skip]
    relay.register(Adds())
    assert relay.fire("decide", moment=None) == [skip, stop]


def test_transform_config_without_a_change_is_what_was_given():
    class Leaves:
        def rlhf_transform_config(self):
            return None

    relay = HookRelay()
    assert relay.transform_config({"lr": 4.0}) == {"lr": 4.0}
    relay.register(Leaves())
    assert relay.transform_config({"lr": 4.0}) == {"lr": 4.0}


@pytest.mark.parametrize("style", ["copy", "in place", "wrapper"])
def test_a_section_that_a_hook_consumes_is_rejected(style: str):
    """`config check` would reject it, and a resume, which reads the resolved run, would not have it."""

    class Copies:
        def rlhf_transform_config(self, config):
            return {key: value for key, value in config.items() if key != "mine"}

    class Pops:
        def rlhf_transform_config(self, config):
            config.pop("mine", None)

    class Wraps:
        @hookimpl(wrapper=True)
        def rlhf_transform_config(self, config):
            yield
            return [{"train": {}}]

    hook = {"copy": Copies, "in place": Pops, "wrapper": Wraps}[style]()
    with pytest.raises(ConfigError, match=r"mine: unknown key"):
        train({"model": {"path": "builtin:tiny-digits"}, "mine": {"x": 1}}, hooks=[hook], dry_run=True)


def test_an_answer_that_is_no_run_file_is_named():
    class Wrong:
        def rlhf_transform_config(self):
            return 3

    class WrongWrapper:
        @hookimpl(wrapper=True)
        def rlhf_transform_config(self):
            yield
            return [3]

    for plugin in (Wrong(), WrongWrapper()):
        relay = HookRelay()
        relay.register(plugin, name="wrong", distribution="rlhf-wrong 2.1")
        with pytest.raises(HookError, match=r"wrong.*rlhf-wrong 2\.1.*rlhf_transform_config returned int"):
            relay.transform_config({"lr": 4.0})


def fire(relay: HookRelay, event: str) -> None:
    if event == "transform_config":
        relay.transform_config({})
    else:
        names = [name for name in inspect.signature(spec_function(event)).parameters if name != "self"]
        relay.fire(event, **dict.fromkeys(names))


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
    fire(relay, event)
    inside = ["first", "newer", "older", "last"]
    assert seen == ["old-wrap before", "wrap before", *inside, "wrap after", "old-wrap after"]


@pytest.mark.parametrize(
    "mark", [{}, {"wrapper": True}, {"hookwrapper": True}], ids=["plain", "wrapper", "hookwrapper"]
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("event", ["transform_config", "episode_start", "episode_end", "maker_loop_end", "decide"])
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
    with pytest.raises(HookError) as caught:
        fire(relay, event)
    assert "hook plugin 'breaks' (rlhf-breaks 2.1)" in str(caught.value)
    assert f"rlhf_{event} raised OSError: disk" in str(caught.value)
    if event.endswith("_end") and not (mark and when == "before"):
        assert seen == ["inner"]


@pytest.mark.parametrize("yields", [0, 2])
@pytest.mark.parametrize("style", ["wrapper", "hookwrapper"])
@pytest.mark.filterwarnings("ignore::pluggy.PluggyTeardownRaisedWarning")
def test_a_wrapper_that_does_not_yield_once_is_named(style: str, yields: int):
    class Wrong:
        @hookimpl(**{style: True})
        def rlhf_metrics(self):
            for _ in range(yields):
                yield

    relay = HookRelay()
    relay.register(Wrong(), distribution="rlhf-wrong 2.1")
    with pytest.raises(HookError, match=r"Wrong.*rlhf-wrong 2\.1.*: rlhf_metrics raised RuntimeError: .*yield"):
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
