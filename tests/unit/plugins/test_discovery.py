"""Plugins are found by name in metadata, imported when selected, and wrong ones are named."""

import sys

import pytest

from rlhf_core.components import API_VERSION
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.requirements import not_installed
from rlhf_core.plugins.selected import load

GOOD = """
from pydantic import BaseModel
from rlhf_core.components import Component

class Options(BaseModel):
    size: int = 3

thing = Component("A thing.", Options, "acme_build:build"{extra})
"""
BUILD = """
def build(config, context):
    return ("built", config.size, context)

number = 7
"""


def test_listing_imports_nothing(install):
    install("acme", {"rlhf.algorithms": {"Acme_PPO": "acme_mod:thing"}}, {"acme_mod": "raise RuntimeError('imported')"})
    ref = discover("algorithms")["acme-ppo"]
    assert (ref.name, ref.distribution, ref.version, ref.target) == ("Acme_PPO", "acme", "1.2.3", "acme_mod:thing")
    assert discover("algorithms")["acme-ppo"] == ref
    assert "acme_mod" not in sys.modules


def test_listing_says_what_an_entry_point_needs(install):
    install("acme", {"rlhf.engines": {"thing": "acme_mod:thing [no_such_module, json]"}})
    ref = discover("engines")["thing"]
    assert (ref.target, ref.missing) == ("acme_mod:thing", ("no_such_module",))


@pytest.mark.parametrize("spelling", ["Acme_Thing", "acme-thing", "ACME-THING", "acme_thing"])
def test_names_compare_folded(install, spelling):
    install("acme", {"rlhf.engines": {"acme-thing": "acme_mod:thing"}}, {"acme_mod": GOOD.format(extra="")})
    assert load("engines", spelling).name == "acme-thing"


def test_loads_and_builds(install):
    sources = {"acme_mod": GOOD.format(extra=""), "acme_build": BUILD}
    install("acme", {"rlhf.environments": {"thing": "acme_mod:thing"}}, sources)
    selected = load("environments", "thing")
    assert (selected.kind, selected.name, selected.distribution, selected.version) == (
        "environments",
        "thing",
        "acme",
        "1.2.3",
    )
    assert "acme_build" not in sys.modules, "what a plugin builds is imported when the run starts"
    config = selected.component.config()
    assert selected.build(config, "context") == ("built", 3, "context")


def test_two_distributions_with_one_name_are_both_named(install):
    both = {"be-brief": "acme_mod:thing", "fine": "acme_mod:thing"}
    install("acme", {"rlhf.rewards": both}, {"acme_mod": GOOD.format(extra="")})
    install("bolt", {"rlhf.rewards": {"Be_Brief": "bolt_mod:thing"}}, {"bolt_mod": ""}, version="4.0")
    owners = r"acme 1\.2\.3 \(acme_mod:thing\) and by bolt 4\.0 \(bolt_mod:thing\)"
    with pytest.raises(PluginError, match=owners) as error:
        load("rewards", "be-brief")
    assert error.value.exit_code == 2
    assert load("rewards", "fine").distribution == "acme", "the clash hurts nobody else"


@pytest.mark.parametrize(
    "source", ["raise RuntimeError('boom')", "import no_such_module_xyz", "def broken(:", "other = 1"]
)
def test_a_broken_plugin_is_named_and_hurts_nobody_else(install, source):
    install("acme", {"rlhf.rewards": {"broken": "acme_broken:thing"}}, {"acme_broken": source})
    install("bolt", {"rlhf.rewards": {"fine": "bolt_mod:thing"}}, {"bolt_mod": GOOD.format(extra="")})
    assert load("rewards", "fine").distribution == "bolt"
    with pytest.raises(
        PluginError, match=r'reward "broken" \(acme 1\.2\.3\): cannot import acme_broken:thing'
    ) as error:
        load("rewards", "broken")
    assert error.value.__cause__ is not None


def test_unknown_name_suggests_lists_and_says_what_to_install(install):
    install("acme", {"rlhf.rewards": {"brevity": "acme_mod:thing"}})
    with pytest.raises(PluginError, match='no reward "brevitty" is installed; did you mean "brevity"') as error:
        load("rewards", "brevitty")
    assert "installed: " in error.value.message
    assert "brevity" in error.value.message.partition("installed: ")[2]


def test_a_plugin_of_this_project_that_is_not_installed_gets_its_install_line(monkeypatch):
    monkeypatch.setattr("rlhf_core.plugins.discovery.discover", lambda kind: {})
    with pytest.raises(PluginError) as error:
        load("transports", "Ray")
    assert error.value.hint == "pip install rlhf-ray"
    with pytest.raises(PluginError, match='did you mean "gemini"') as error:
        load("strategies", "gemni")
    assert error.value.hint == "pip install rlhf-colossalai"


def test_a_missing_required_module_is_an_error_with_the_install_line(install):
    extra = ', requires=("no_such_module_xyz", "json"), install="pip install xyz==1"'
    install("acme", {"rlhf.engines": {"thing": "acme_mod:thing"}}, {"acme_mod": GOOD.format(extra=extra)})
    selected = load("engines", "thing", check_requires=False)
    assert not_installed(selected.component.requires) == ("no_such_module_xyz",)
    with pytest.raises(PluginError, match="needs no_such_module_xyz, not installed") as error:
        load("engines", "thing")
    assert error.value.hint == "pip install xyz==1"


@pytest.mark.parametrize(
    ("requires", "extra_line", "problem"),
    [
        (["odd-lib>=2,<3; extra == 'odd'"], "", "needs odd-lib<3,>=2, but 1.9.2 is installed"),
        (["odd-lib>=2,<3; extra == 'odd'"], ', install="pip install acme[odd]"', "needs odd-lib<3,>=2"),
        (["odd-lib>=2,<3; extra == 'odd'", "odd-lib<2; extra == 'old'"], "", None),
        (["odd-lib>=2,<3; python_version < '3'"], "", None),
        (["odd-lib>=1"], "", None),
        ([], "", None),
    ],
)
def test_a_required_module_in_another_version_is_an_error_with_both(install, requires, extra_line, problem):
    """A library of another major version would fail at import, as if the plugin were broken."""
    extra = f', requires=("odd_lib",){extra_line}'
    source = {"acme_mod": GOOD.format(extra=extra)}
    install("acme", {"rlhf.engines": {"thing": "acme_mod:thing"}}, source, requires=requires)
    install("odd-lib", {}, {"odd_lib": ""}, version="1.9.2")
    if problem is None:
        assert load("engines", "thing").name == "thing"
        return
    with pytest.raises(PluginError, match=problem) as error:
        load("engines", "thing").import_build()
    assert error.value.where == 'engine "thing" (acme 1.2.3)'
    assert error.value.hint == ("pip install acme[odd]" if extra_line else "pip install 'odd-lib<3,>=2'")


@pytest.mark.parametrize(("api", "upgrade"), [(999, "rlhf-core"), (API_VERSION - 1, "acme")])
def test_another_plugin_api_is_a_clear_error(install, api, upgrade):
    extra = f", api_version={api}"
    install("acme", {"rlhf.engines": {"thing": "acme_mod:thing"}}, {"acme_mod": GOOD.format(extra=extra)})
    with pytest.raises(PluginError, match=f"made for plugin API {api}, this rlhf-core has {API_VERSION}") as error:
        load("engines", "thing")
    assert error.value.hint == f"pip install --upgrade {upgrade}"


@pytest.mark.parametrize(
    ("target", "message"), [("acme_mod:number", "is a int, not a rlhf_core.Component"), ("acme_mod:Options", "is a")]
)
def test_what_is_no_component_is_refused(install, target, message):
    install("acme", {"rlhf.engines": {"thing": target}}, {"acme_mod": GOOD.format(extra="") + "\nnumber = 1\n"})
    with pytest.raises(PluginError, match=message):
        load("engines", "thing")


def test_a_config_that_is_no_pydantic_model_is_refused(install):
    source = "from rlhf_core.components import Component\nthing = Component('A.', dict, 'a:b')"
    install("acme", {"rlhf.engines": {"thing": "acme_mod:thing"}}, {"acme_mod": source})
    with pytest.raises(PluginError, match="not a pydantic model"):
        load("engines", "thing")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("acme_nowhere:build", "cannot import acme_nowhere:build"),
        ("acme_build:absent", "cannot import acme_build:absent"),
        ("acme_build:number", "is a int, not a callable"),
    ],
)
def test_a_wrong_build_target_is_named(install, build, message):
    sources = {"acme_mod": GOOD.format(extra="").replace("acme_build:build", build), "acme_build": BUILD}
    install("acme", {"rlhf.engines": {"thing": "acme_mod:thing"}}, sources)
    with pytest.raises(PluginError, match=message):
        load("engines", "thing").import_build()


RAISING = """
from rlhf_core.errors import ConfigError

def build(config, context):
    return {}["key"]

def refuse(config, context):
    raise ConfigError("is too small", where="train.samples_per_prompt", hint="raise it")
"""


@pytest.mark.parametrize("kind", ["algorithms", "strategies", "rewards", "transports", "engines", "prompts"])
def test_an_error_in_build_names_the_plugin(install, kind):
    install(
        "acme",
        {f"rlhf.{kind}": {"thing": "acme_mod:thing"}},
        {"acme_mod": GOOD.format(extra=""), "acme_build": RAISING},
    )
    selected = load(kind, "thing")
    with pytest.raises(PluginError) as caught:
        selected.build(selected.component.config(), None)
    assert selected.label in str(caught.value)
    assert "acme_build:build raised KeyError: 'key'" in str(caught.value)
    assert "acme_build.py, line 5" in str(caught.value), "where it was raised, for its author"
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_for_the_user_keeps_its_kind_and_names_the_plugin_too(install):
    sources = {
        "acme_mod": GOOD.format(extra="").replace("acme_build:build", "acme_build:refuse"),
        "acme_build": RAISING,
    }
    install("acme", {"rlhf.algorithms": {"thing": "acme_mod:thing"}}, sources)
    selected = load("algorithms", "thing")
    with pytest.raises(ConfigError) as caught:
        selected.build(selected.component.config(), None)
    assert (caught.value.where, caught.value.hint) == ("train.samples_per_prompt", "raise it")
    shown = 'train.samples_per_prompt: is too small (algorithm "thing" (acme 1.2.3))\n  -> raise it'
    assert str(caught.value) == shown


def test_what_is_installed_while_a_program_runs_is_found(install):
    install("acme-first", {"rlhf.rewards": {"first": "acme:one"}})
    assert "first" in discover("rewards")
    install("acme-second", {"rlhf.rewards": {"second": "acme:two"}})
    assert {"first", "second"} <= set(discover("rewards"))
