"""A section of anybody draws the prompts of a run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlhf_core import Component, Section
from rlhf_core.config.resolve import resolve
from rlhf_core.config.resolved import Configured
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.wiring import RunInputs
from rlhf_testing.runs import tiny_run


class First:
    """Always draws the same record."""

    def __init__(self, records):
        self.records = records


class FirstConfig(Section):
    def sampler(self, records):
        return First(records)


class Broken(Section):
    def sampler(self, records):
        raise KeyError("level")


def inputs_of(**sections):
    def brought(name, config):
        component = Component(summary="A stranger's.", config=config)
        return Configured.of(SelectedPlugin("sections", name, component, f"acme-{name}", "1.0"), config())

    found = {name: brought(name, config) for name, config in sections.items()}
    return RunInputs(replace(resolve(tiny_run()), sections=found))


def test_a_strangers_section_brings_a_sampler_over_the_training_records():
    inputs = inputs_of(first=FirstConfig, other=Section)
    sampler = inputs.sampler()
    assert isinstance(sampler, First) and sampler.records is inputs.prompts
    assert inputs.sampler() is not sampler, "the trainer's and a maker's have states of their own"


def test_without_one_the_prompts_are_drawn_in_turn():
    assert inputs_of(other=Section).sampler() is None


def test_two_are_an_error_that_names_both():
    with pytest.raises(ConfigError, match=r"acme-first 1\.0.*acme-second 1\.0"):
        inputs_of(first=FirstConfig, second=FirstConfig).sampler()


def test_one_that_raises_is_named():
    with pytest.raises(PluginError, match=r"sampler of the section broken raised KeyError") as caught:
        inputs_of(broken=Broken).sampler()
    assert "acme-broken 1.0" in str(caught.value)


def test_the_curriculum_is_brought_as_a_strangers_is():
    run = tiny_run({"prompts": {"name": "sort-digits", "size": 20, "curriculum": {"success_score": 0.5}}})
    sampler = RunInputs(resolve(run)).sampler()
    rewards = [{"exact-match": 0.5}, {"exact-match": 0.4}, {"exact-match": 1.0}]
    items = [SimpleNamespace(rewards=each, branch=0) for each in rewards]
    items.append(SimpleNamespace(rewards={"exact-match": 0.0}, branch=1))
    assert sampler.judge(SimpleNamespace(items=items)) == 2 / 3
    assert sampler.judge(SimpleNamespace(items=[])) is None
