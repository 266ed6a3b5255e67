"""What a plugin built is of its kind, or the plugin is named: no attribute of None is missed later in a run."""

import pytest

from rlhf_core.errors import PluginError
from rlhf_core.plugins.selected import load

PLUGIN = """
from rlhf_core import Component, Section
from rlhf_core.config import TransportConfig

class Options(Section):
    pass

class TransportOptions(TransportConfig):
    pass

it = Component("A thing.", {options}, "acme_build:build")
"""


def build(install, kind, returned):
    options = "TransportOptions" if kind == "transports" else "Options"
    sources = {"acme_mod": PLUGIN.format(options=options)}
    sources["acme_build"] = f"def build(config, context):\n    return {returned}\n"
    install("acme", {f"rlhf.{kind}": {"acme-thing": "acme_mod:it"}}, sources)
    selected = load(kind, "acme-thing")
    return selected.build(selected.component.config(), None)


@pytest.mark.parametrize(
    ("kind", "returned", "wrong"),
    [
        ("rewards", "None", "a NoneType, which cannot be called with rollouts"),
        ("algorithms", "None", "a NoneType, which is not a rlhf_core.algorithm.RolloutAlgorithm"),
        ("strategies", "{}", "a dict, which is not a rlhf_core.strategy.Strategy"),
        ("engines", "{}", "a dict, which is not a rlhf_core.protocols.RolloutEngine"),
        ("transports", "None", r"a NoneType, which does not have run\(request\)"),
        ("prompts", "None", "a NoneType, which is not a PromptSource"),
        ("prompts", "({'prompt': '1>'} for _ in range(9))", "a generator, which can be read only once"),
        ("loggers", "object()", "a object, which is not a rlhf_core.protocols.Logger"),
    ],
)
def test_what_is_no_plugin_of_its_kind_is_refused_by_name(install, kind, returned, wrong):
    with pytest.raises(PluginError, match=rf'"acme-thing" \(acme 1.2.3\): its build returned {wrong}') as caught:
        build(install, kind, returned)
    assert "rlhf plugins check acme-thing" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "returned"), [("prompts", "[{'prompt': '1>'}]"), ("rewards", "len"), ("environments", "None")]
)
def test_what_fits_is_taken(install, kind, returned):
    build(install, kind, returned)


def test_an_entry_point_in_a_group_that_nothing_reads_is_told(install):
    install("acme", {"rlhf.reward": {"acme-thing": "acme_mod:it"}})
    with pytest.raises(PluginError, match='"acme-thing" of acme is in the group rlhf.reward, which is unknown') as it:
        load("rewards", "Acme_Thing")
    assert 'did you mean "rlhf.rewards"' in str(it.value)
