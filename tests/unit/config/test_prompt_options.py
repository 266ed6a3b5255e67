"""A prompt source's options are core's and its own: it may have other defaults, and evaluation other limits."""

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.config.sections import PromptsConfig
from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import load
from rlhf_core.wiring.inputs import RunInputs
from rlhf_testing.models import tiny_tokenizer

LONG = """
from rlhf_core import Component
from rlhf_core.config import PromptsConfig

class Long(PromptsConfig):
    max_prompt_tokens: int = 6

def build(config, context):
    return [{"prompt": "1234>"}, {"prompt": "123456789>"}]

long = Component("Long ones.", Long, "acme_long:build")
"""


@pytest.fixture
def run(install, fake_plugins, fake_run):
    install("acme", {"rlhf.prompts": {"acme-long": "acme_long:long"}}, {"acme_long": LONG})
    return {**fake_run, "prompts": "acme-long"}


def lengths(resolved):
    inputs = RunInputs(resolved)
    inputs.tokenizer = tiny_tokenizer()
    stream = inputs.stream_of(resolved.eval_prompts.get(None))
    return {len(stream.prompt(position).prompt_ids) for position in range(4)}


def test_cores_own_sources_have_cores_options():
    ours = [ref for ref in discover("prompts").values() if ref.distribution in ("rlhf-core", "rlhf-data")]
    assert len(ours) == 5
    assert all(issubclass(load("prompts", ref.name).component.config, PromptsConfig) for ref in ours)


def test_a_source_has_a_default_length_of_its_own(run):
    resolved = resolve(run)
    assert resolved.prompts.config.max_prompt_tokens == 6
    assert lengths(resolved) == {5}


def test_evaluation_takes_the_runs_limits_unless_it_has_its_own(run):
    run = {**run, "prompts": {"name": "acme-long", "max_prompt_tokens": 4, "too_long": "error"}}
    same = resolve({**run, "eval": {"prompts": "acme-long"}})
    held_out = same.eval_prompts[None].config
    assert (held_out.max_prompt_tokens, held_out.too_long) == (4, "error")
    other = resolve({**run, "eval": {"prompts": {"name": "acme-long", "max_prompt_tokens": 16}}})
    assert lengths(other) == {5, 10}
    assert resolve(other.to_mapping()).to_mapping() == other.to_mapping()
