"""The order of every hook is pluggy's, and whoever raises is named."""

from __future__ import annotations

import inspect

import pytest
from hook_specs import spec_function

from rlhf_core.errors import ConfigError, HookError, PluginError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import hookimpl


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


def test_transform_config_without_a_change_is_what_was_given():
    class Leaves:
        def rlhf_transform_config(self):
            return None

    relay = HookRelay()
    assert relay.transform_config({"lr": 4.0}) == {"lr": 4.0}
    relay.register(Leaves())
    assert relay.transform_config({"lr": 4.0}) == {"lr": 4.0}


@pytest.mark.parametrize("style", ["copy", "in place"])
def test_a_section_that_a_hook_consumes_is_rejected(style: str):
    """`config check` would reject it, and a resume, which reads the resolved run, would not have it."""

    class Copies:
        def rlhf_transform_config(self, config):
            return {key: value for key, value in config.items() if key != "mine"}

    class Pops:
        def rlhf_transform_config(self, config):
            config.pop("mine", None)

    relay = HookRelay()
    relay.register({"copy": Copies, "in place": Pops}[style](), name="greedy", distribution="greedy 1.0")
    with pytest.raises(ConfigError, match=r"greedy.*greedy 1\.0.*removes the section `mine`"):
        relay.transform_config({"train": {}, "mine": {"x": 1}})
    assert relay.transform_config({"train": {}}) == {"train": {}}


def test_an_answer_that_is_no_run_file_is_named():
    class Wrong:
        def rlhf_transform_config(self):
            return 3

    relay = HookRelay()
    relay.register(Wrong(), name="wrong", distribution="rlhf-wrong 2.1")
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

    def hook(self):
        seen.append(name)

    return type(name, (), {f"rlhf_{event}": hookimpl(**mark)(hook)})()


@pytest.mark.parametrize("event", sorted(HookRelay().events))
def test_every_hook_has_pluggys_order(event: str):
    seen: list[str] = []
    relay = HookRelay()
    for name, mark in {"first": {"tryfirst": True}, "older": {}, "last": {"trylast": True}, "newer": {}}.items():
        relay.register(_marked(seen, name, event, **mark), name=name)
    fire(relay, event)
    assert seen == ["first", "newer", "older", "last"]


@pytest.mark.parametrize("event", ["transform_config", "episode_start", "episode_end", "maker_loop_end", "decide"])
def test_who_raises_is_named_and_no_listener_of_an_end_is_left_out(event: str):
    seen: list[str] = []

    def hook(self):
        raise OSError("disk")

    relay = HookRelay()
    relay.register(_marked(seen, "inner", event), name="inner")
    breaks = type("Breaks", (), {f"rlhf_{event}": hook})()
    relay.register(breaks, name="breaks", distribution="rlhf-breaks 2.1")
    with pytest.raises(HookError) as caught:
        fire(relay, event)
    assert "hook plugin 'breaks' (rlhf-breaks 2.1)" in str(caught.value)
    assert f"rlhf_{event} raised OSError: disk" in str(caught.value)
    if event.endswith("_end"):
        assert seen == ["inner"]


@pytest.mark.parametrize("style", ["wrapper", "hookwrapper"])
def test_a_wrapper_is_refused(style: str):
    class Wraps:
        @hookimpl(**{style: True})
        def rlhf_metrics(self):
            yield

    relay = HookRelay()
    with pytest.raises(PluginError, match=r"rlhf-wraps 2\.1.*rlhf_metrics is a wrapper"):
        relay.register(Wraps(), distribution="rlhf-wraps 2.1")
    assert not relay.listens("metrics") and not relay.plugins


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
