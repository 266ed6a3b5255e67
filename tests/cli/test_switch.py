"""What a flag that selects another plugin keeps of the options of the one before."""

import pytest

from rlhf_cli.run_arguments import option_names, switch_plugin
from rlhf_core.config.sections import EngineConfig


def test_switching_a_plugin_keeps_the_options_both_have():
    run = {"engine": {"name": "hf", "max_new_tokens": 5, "cache": True}}
    assert switch_plugin(run, "engine", "vllm", ["max_new_tokens"]) == ["engine.cache"]
    assert run == {"engine": {"name": "vllm", "max_new_tokens": 5}}
    assert switch_plugin(run, "engine", "VLLM", []) == []
    assert run == {"engine": {"name": "vllm", "max_new_tokens": 5}}
    assert switch_plugin(run, "strategy", "ddp", []) == []
    assert run["strategy"] == {"name": "ddp"}


@pytest.mark.usefixtures("fake_plugins")
def test_option_names_hold_what_survives_a_switch(install):
    assert option_names("engines", "fake-engine-2") == list(EngineConfig.model_fields)
    source = """
        from pydantic import BaseModel
        from rlhf_core.components import Component
        class C(BaseModel):
            speed: int = 1
        thing = Component("A.", C, "a:b")
    """
    install("acme", {"rlhf.engines": {"acme-engine": "acme_plain:thing"}}, {"acme_plain": source})
    assert option_names("engines", "acme-engine") == [*EngineConfig.model_fields, "speed"]
