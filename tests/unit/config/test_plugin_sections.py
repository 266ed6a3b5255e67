"""Sections of run files that plugins bring (`rlhf.sections`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_cli.main import cli, run
from rlhf_cli.run_schema import run_schema
from rlhf_core.config.fitting import config_changes
from rlhf_core.config.load import load_run
from rlhf_core.config.resolve import resolve
from rlhf_core.entry.resume import check_owners
from rlhf_core.errors import ConfigError, UserInputError
from rlhf_core.plugins.names import KNOWN
from rlhf_core.runfolder.folder import RunFolder

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sections.md"
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
SOURCE = "from pydantic import Field\nfrom rlhf_core import Section\n" + BLOCKS["python"]
ENTRY = {"rlhf.sections": {"safety": "acme_safety:safety"}}
RUN: dict[str, Any] = {
    "model": {"path": "builtin:tiny-digits"},
    "prompts": {"name": "sort-digits", "max_prompt_tokens": 16},
    "rewards": [{"name": "exact-match"}],
    "train": {"episodes": 2, "prompts_per_episode": 32},
    **yaml.safe_load(BLOCKS["yaml"]),
}


@pytest.fixture
def safety(install):
    """The distribution of docs/sections.md."""
    install("acme", ENTRY, {"acme_safety": SOURCE})


def test_the_page_s_section_is_checked_adapted_and_read(safety):
    resolved = resolve(RUN)
    section = resolved.section("safety")
    assert (section.most, section.window) == (0.1, 32)
    assert [str(each) for each in resolved.adapted] == ["safety.window: None -> 32 (one episode of this run)"]
    assert resolved.to_mapping()["safety"] == {"reward": "exact-match", "most": 0.1, "window": 32}
    again = resolve(resolved.to_mapping())
    assert again.to_mapping() == resolved.to_mapping() and not again.adapted


def test_a_section_may_select_a_plugin_whose_options_stand_beside_its_own(install):
    source = """
from typing import ClassVar
from pydantic import Field
from rlhf_core import Component, Section

class Probe(Section):
    selects: ClassVar[str] = "rewards"
    every: int | None = Field(None, ge=1, description="Episodes between two probes.")

    def with_plugin(self, plugin):
        return self if self.every else self.model_copy(update={"every": len(plugin.name)})

probe = Component(summary="Probes with another reward.", config=Probe)
"""
    install("acme", {"rlhf.sections": {"probe": "acme_probe:probe"}}, {"acme_probe": source})
    run = {key: value for key, value in RUN.items() if key != "safety"}
    resolved = resolve({**run, "probe": {"name": "length", "every": 3, "target_tokens": 9}})
    section = resolved.sections["probe"]
    assert section.config.every == 3 and section.config.target_tokens == 9 and section in resolved.selected
    mapping = resolved.to_mapping()
    assert mapping["probe"].items() >= {"name": "length", "every": 3, "target_tokens": 9}.items()
    assert resolve(mapping).to_mapping() == mapping
    assert resolve({**run, "probe": "exact-match"}).sections["probe"].config.every == len("exact-match")
    for wrong, told in [
        ({"name": "length", "evry": 3}, r"probe\.evry.*did you mean \"every\""),
        ({"name": "lengt"}, r"probe\.name.*did you mean \"length\""),
        ({"every": 3}, r"probe\.name.*is required"),
        ({"name": "length", "every": 0}, r"probe\.every"),
    ]:
        with pytest.raises(ConfigError, match=told):
            resolve({**run, "probe": wrong})
    schema, _ = run_schema()
    choices = [each["$ref"].rpartition("/")[2] for each in schema["properties"]["probe"]["anyOf"] if "$ref" in each]
    assert any({"every", "target_tokens"} <= set(schema["$defs"][each]["properties"]) for each in choices)


def test_one_section_alone_gives_the_reward_of_a_player(install):
    source = """
from rlhf_core import Component, Section

class Judged(Section):
    def reward_weight(self):
        return 0.5

judged = Component(summary="Grades what it plays.", config=Judged)
"""
    install("acme", {"rlhf.sections": {"judged": "acme_judged:judged"}}, {"acme_judged": source})
    run = {key: value for key, value in RUN.items() if key != "safety"}
    assert resolve({**run, "judged": {}}).reward_weights == {"environment": 0.5, "exact-match": 1.0}
    with pytest.raises(ConfigError, match=r"both give the reward environment: remove one section"):
        resolve({**run, "judged": {}, "environment": {"name": "guess-number"}})


def test_a_section_may_be_called_like_a_part_of_core_s(install):
    """Its place in the run file is its own, and its options are not those of a run."""
    named = SOURCE.replace("window", "strategy").replace("int | None = Field(None, ge=1", "str | None = Field(None")
    source = named.replace("run.run.train.samples_per_episode", "'all'").replace("one episode of this run", "said")
    install("acme", {"rlhf.sections": {"schedule": "acme_schedule:safety"}}, {"acme_schedule": source})
    options = {"reward": "exact-match", "most": 0.1}
    run = {key: value for key, value in RUN.items() if key != "safety"}
    resolved = resolve({**run, "schedule": options})
    assert [str(each) for each in resolved.adapted] == ["schedule.strategy: None -> 'all' (said)"]
    with pytest.raises(ConfigError, match="schedule.strategy: should be a valid string"):
        resolve({**run, "schedule": {**options, "strategy": 3}})
    with pytest.raises(ConfigError, match=r"^[^.]*schedule\.reward: no reward"):
        resolve({**run, "schedule": {**options, "reward": "none"}})


def test_a_number_may_set_the_option_that_the_section_names(install):
    install("acme", ENTRY, {"acme_safety": SOURCE.replace("adapt_reasons", 'short_option = "most"\n    adapt_reasons')})
    run = {**RUN, "rewards": [{"name": "exact-match", "label": "harmless"}]}
    resolved = resolve({**run, "safety": 0.25})
    assert resolved.to_mapping()["safety"] == {"reward": "harmless", "most": 0.25, "window": 32}
    assert resolve(load_run(resolved.to_mapping(), ["safety=0.5"])).section("safety").most == 0.5
    with pytest.raises(ConfigError, match=r"--set safety: safety\.most: should be less than or equal to 1"):
        resolve(load_run(run, ["safety=2"]))
    with pytest.raises(ConfigError, match=r"safety: should be a mapping of options, or true \(given \[1\]\)"):
        resolve({**run, "safety": [1]})
    document, _ = run_schema()
    kinds = document["properties"]["safety"]["anyOf"]
    assert {"type": "number", "minimum": 0, "maximum": 1} in kinds and {"$ref": "#/$defs/SafetyConfig"} in kinds


def test_a_run_without_the_section_has_none(safety):
    resolved = resolve({key: value for key, value in RUN.items() if key != "safety"})
    assert resolved.section("safety") is None and "safety" not in resolved.to_mapping()


def test_problems_are_reported_with_all_others(safety):
    wrong = {**RUN, "safety": {"reward": "harmless"}, "optimizer": {"lr": -1.0}}
    with pytest.raises(ConfigError) as caught:
        resolve(wrong)
    text = str(caught.value)
    assert "2 problems" in text and "optimizer.lr" in text
    assert "safety.reward: no reward \"harmless\" in this run (rewards: ['exact-match'])" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("safety.mosst=0.2", 'did you mean "most"?'),
        ("safety.most=2", "--set safety.most"),
        ("safety=3", "should be a mapping of options"),
        ("saftey.most=0.1", 'did you mean "safety"?'),
    ],
)
def test_options_are_validated(safety, override, message):
    with pytest.raises(ConfigError) as caught:
        resolve(load_run(RUN, [override]))
    assert message in str(caught.value)


def test_a_check_that_raises_is_the_plugin_s_fault(install):
    install("acme", ENTRY, {"acme_safety": SOURCE.replace("run.reward_weights:", "run.nothing:")})
    with pytest.raises(ConfigError, match=r'section "safety" \(acme 1.2.3\): checking the section safety raised'):
        resolve(RUN)


def test_the_command_knows_it(safety, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    told = CliRunner().invoke(cli, ["config", "check", str(file)])
    assert told.exit_code == 0, told.output
    assert "adapted to the run: safety.window: None -> 32 (one episode of this run)" in told.output
    shown = CliRunner().invoke(cli, ["config", "show", str(file), "--set", "safety.window=7"])
    assert yaml.safe_load(shown.stdout)["safety"]["window"] == 7
    assert "sections/safety (acme 1.2.3)" in CliRunner().invoke(cli, ["plugins", "show", "safety"]).output
    assert "acme_safety:safety" in CliRunner().invoke(cli, ["plugins", "list"]).output


@pytest.mark.slow
@pytest.mark.usefixtures("safety")
def test_its_check_passes():
    assert run(["plugins", "check", "safety"]) == 0


def test_the_schema_has_it(safety):
    document, left_out = run_schema()
    assert not left_out
    assert "safety" in document["properties"] and "guards" in document["properties"]
    assert "most" in json.dumps(document["$defs"]) and document["properties"]["safety"]
    jsonl = [each for each in document["$defs"].values() if each.get("title") == "jsonl"]
    assert any("curriculum" in each["properties"] for each in jsonl)


def test_two_owners_are_named(install, tmp_path, capsys):
    install("acme", ENTRY, {"acme_safety": SOURCE})
    install("other", {"rlhf.sections": {"safety": "other_safety:safety"}}, {"other_safety": SOURCE})
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    assert run(["config", "check", str(file)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "acme 1.2.3 (acme_safety:safety)" in told and "other 1.2.3 (other_safety:safety)" in told


@pytest.mark.parametrize("command", [["train", "--resume"], ["train", "--dry-run", "--from"]])
def test_a_run_folder_without_the_owner_names_what_to_install(tmp_path, capsys, command):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.manifest.write_text(
        json.dumps({"owners": {"sections": {"safety": "acme 1.2.3", "guards": "rlhf-core 0.1.0"}}})
    )
    folder.config.write_text(yaml.safe_dump(RUN))
    assert run([*command, str(folder.path)]) == 2
    told = capsys.readouterr().err
    assert "the run has the section safety of acme 1.2.3, which is not installed" in told
    assert "pip install acme==1.2.3" in told


@pytest.mark.parametrize(
    ("kind", "name", "owner", "says"),
    [
        ("optimizers", "signum", "acme 1.2.3", "the optimizer signum of acme 1.2.3"),
        ("engines", "tern", "acme 1.2.3", "the engine tern of acme 1.2.3"),
        ("hooks", "watch", "acme 1.2.3", "the hook plugin watch of acme 1.2.3"),
        ("schedules", "restarts", "acme 1.2.3", "the schedule restarts of acme 1.2.3"),
        ("kinds of a later core", "new", "acme 1.2.3", "the kinds of a later core new of acme 1.2.3"),
    ],
)
def test_a_missing_owner_of_any_plugin_names_what_to_install(tmp_path, kind, name, owner, says):
    folder = RunFolder(tmp_path)
    owners = {"algorithms": {"PPO": "rlhf-ppo 0.0.1"}, kind: {name: owner}}
    folder.manifest.write_text(json.dumps({"owners": owners}))
    with pytest.raises(UserInputError, match=f"the run has {says}, which is not installed") as caught:
        check_owners(folder)
    assert caught.value.hint == "pip install acme==1.2.3"


def test_one_that_has_moved_to_another_distribution_names_that(tmp_path, monkeypatch):
    monkeypatch.setitem(KNOWN["sections"], "moved", "rlhf-moved")
    folder = RunFolder(tmp_path)
    folder.manifest.write_text(json.dumps({"owners": {"sections": {"moved": "rlhf-core 0.1.0"}}}))
    with pytest.raises(UserInputError, match="the section moved of rlhf-core") as caught:
        check_owners(folder)
    assert caught.value.hint == "pip install rlhf-moved"


@pytest.mark.parametrize("name", ["moved", "prompts.moved"])
def test_a_section_of_ours_that_is_not_installed_names_what_to_install(monkeypatch, name):
    monkeypatch.setitem(KNOWN["sections"], name, "rlhf-moved")
    with pytest.raises(ConfigError, match=f"{re.escape(name)}: unknown key") as caught:
        resolve(load_run({key: RUN[key] for key in ("model", "prompts")}, [(name, {"window": 4})]))
    assert caught.value.hint == "pip install rlhf-moved"


@pytest.mark.slow
def test_a_run_notes_the_owner_for_a_resume(safety, tmp_path, capsys):
    file, output = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump({**RUN, "train": {"episodes": 1, "prompts_per_episode": 4}}))
    assert run(["train", str(file), "--output", str(output), "--quiet"]) == 0
    folder = RunFolder(output)
    assert folder.read_json(folder.manifest)["owners"]["sections"]["safety"] == "acme 1.2.3"
    assert folder.read_config()["safety"]["window"] == 4
    rmtree(tmp_path / "site" / "acme-1.2.3.dist-info")
    capsys.readouterr()
    for command in (
        ["train", "--resume", str(output)],
        ["train", str(file), "--output", str(output), "--resume", "auto"],
    ):
        assert run(command) == 2
        told = capsys.readouterr().err
        assert "the run has the section safety of acme 1.2.3, which is not installed" in told
        assert "pip install acme==1.2.3" in told


def test_a_resume_says_what_changed(safety):
    before, after = (resolve(load_run(RUN, [f"safety.most={most}"])).to_mapping() for most in (0.1, 0.2))
    told = [str(change) for change in config_changes(before, after)]
    assert told == ["safety.most: 0.1 -> 0.2"]


def test_late_samples_are_weighted_and_it_is_said():
    late = {**RUN, "transport": {"name": "ray", "max_staleness": 1}}
    late.pop("safety")
    resolved = resolve(late)
    assert resolved.algorithm.config.importance_cap == 2.0
    told = "algorithm.importance_cap: None -> 2.0 (samples may come from older weights)"
    assert told in [str(change) for change in resolved.adapted]
    kept = resolve({**late, "algorithm": {"name": "ppo", "importance_cap": None}})
    assert kept.algorithm.config.importance_cap is None and not kept.adapted


ranges = st.tuples(st.floats(0, 0.4), st.floats(0.5, 1)).map(list)
runs = st.fixed_dictionaries(
    {},
    optional={
        "safety": st.fixed_dictionaries(
            {"reward": st.just("exact-match")},
            optional={"most": st.floats(0, 1), "window": st.none() | st.integers(1, 9)},
        ),
        "guards": st.fixed_dictionaries(
            {}, optional={"kl": st.fixed_dictionaries({"bound": st.none() | st.floats(0.1, 9)})}
        ),
        "prompts": st.fixed_dictionaries(
            {"name": st.just("sort-digits"), "max_prompt_tokens": st.integers(16, 32)},
            optional={"curriculum": st.none() | st.fixed_dictionaries({"success": ranges})},
        ),
        "transport": st.sampled_from([{"name": "local"}, {"name": "ray", "max_staleness": 2}]),
    },
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=runs)
def test_a_resolved_run_resolves_to_itself(safety, drawn):
    once = resolve(load_run({**RUN, **drawn}))
    again = resolve(load_run(once.to_mapping()))
    assert again.to_mapping() == once.to_mapping() and not again.adapted
    assert again.sections.keys() == once.sections.keys()
