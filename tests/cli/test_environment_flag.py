"""`rlhf train --environment`: the section of the run file, chosen by a flag."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from chat_templates import chat_tokenizer

from rlhf_cli.main import run
from rlhf_cli.run_arguments import RunArguments
from rlhf_core import train
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, PluginError
from rlhf_testing.models import save_tiny_model

GAMES = '''
class Count:
    """Say digits; rewarded for the right one."""

    def __init__(self, *, goal: int = 7):
        self.goal = goal

    def reset(self, task):
        return "12>"

    def step(self, reply):
        found = str(self.goal) in reply.text
        return "34>", float(found), found


class Other(Count):
    """Without options."""

    def __init__(self):
        super().__init__()


class Nothing:
    """No environment."""


class Taken(Count):
    """With options by names of core's."""

    def __init__(self, *, retries: int = 7, max_turns: int = 3):
        super().__init__()
'''


@pytest.fixture
def games(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(GAMES)
    return path


@pytest.fixture
def run_file(tmp_path, games):
    path = tmp_path / "run.yaml"
    path.write_text(
        'model: {path: "builtin:tiny-digits"}\n'
        f"environment: {{name: '{games}:Count', goal: 3, max_turns: 2}}\n"
        "engine: {max_new_tokens: 4}\n"
        "train: {episodes: 1, prompts_per_episode: 4, samples_per_prompt: 1, train_batch_size: 4}\n"
    )
    return str(path)


def test_the_flag_names_the_environment_of_a_run_without_one(tmp_path, games):
    plain = tmp_path / "plain.yaml"
    plain.write_text("prompts: {name: sort-digits}\n")
    mapping, dropped = RunArguments(run_file=str(plain), environment=f"{games}:Count").mapping()
    assert mapping["environment"] == {"name": f"{games}:Count"}
    assert dropped == []


def test_another_environment_keeps_cores_options_and_drops_the_old_ones_own(run_file, games):
    mapping, dropped = RunArguments(run_file=run_file, environment=f"{games}:Other").mapping()
    assert mapping["environment"] == {"name": f"{games}:Other", "max_turns": 2}
    assert dropped == ["environment.goal"]


def test_a_run_with_the_flag_can_run(run_file, games, capsys):
    assert run(["train", run_file, "--environment", f"{games}:Other", "--dry-run"]) == 0
    assert "note: dropped environment.goal" in capsys.readouterr().err


def test_show_lists_its_own_options_and_those_of_core(install, games, capsys):
    install("acme", {"rlhf.environments": {"acme-count": "acme_games:Count"}}, {"acme_games": GAMES})
    assert run(["plugins", "show", "environment/acme-count"]) == 0
    own, core = capsys.readouterr().out.split("READ BY CORE")
    assert "Say digits; rewarded for the right one." in own and "goal" in own and "max_turns" not in own
    assert all(option in core for option in ("max_turns", "history", "tool_format", "on_failure"))
    assert run(["plugins", "show", "environment/acme-count", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown["options"]["properties"]) == ["goal"]
    assert "max_turns" in shown["options_of_core"]["properties"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Nothing", "Nothing is not an environment: reset is missing"),
        ("Taken", "its options max_turns, retries have names that core reads itself"),
        ("Cuont", 'does not define a class "Cuont"; did you mean "Count"?'),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_runs(run_file, games, capsys, name, told):
    assert run(["train", run_file, "--environment", f"{games}:{name}", "--dry-run"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "section", "told"),
    [
        ("qwen3", {"history": "append"}, None),
        ("chatml", {"tool_format": "xml"}, r"unknown tool format 'xml'"),
    ],
)
def test_a_dry_run_holds_the_chat_template_against_the_section(tmp_path, games, family, section, told):
    model = save_tiny_model(tmp_path / "model", with_tokenizer=False)
    chat_tokenizer(family).save_pretrained(model)
    run = {"model": {"path": str(model)}, "environment": {"name": f"{games}:Count", **section}}
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        train(run, dry_run=True)


def test_a_dry_run_imports_the_environments_code(install):
    install("acme", {"rlhf.environments": {"acme-gone": "acme_gone:gone"}}, {"acme_gone": GONE})
    run = {"model": {"path": "builtin:tiny-digits"}, "environment": {"name": "acme-gone"}}
    with pytest.raises(PluginError, match="acme_missing"):
        train(run, dry_run=True)


def test_a_file_of_tools_that_is_not_there_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = {"name": "tools", "functions": ["./nowhere.py:add"]}
    run = {"model": {"path": "builtin:tiny-digits"}, "environment": section, "rewards": [{"name": "length"}]}
    with pytest.raises(ConfigError, match=r"environment: no such file: .*/nowhere\.py"):
        train(run, output=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_process_of_its_own_is_the_run_files_choice(games):
    asked = {"model": {"path": "builtin:tiny-digits"}, "environment": {"name": f"{games}:Count"}}
    for given, isolate in (({}, False), ({"isolate": True}, True), ({"isolate": False}, False)):
        resolved = resolve({**asked, "environment": {**asked["environment"], **given}})
        assert resolved.to_mapping()["environment"]["isolate"] is isolate


GONE = """
from rlhf_core.components import Component
from rlhf_core.config import Section

gone = Component(summary="Not there.", config=Section, build="acme_missing:build")
"""

COMPONENT = """
from pydantic import BaseModel
from rlhf_core.components import Component

class Options(BaseModel, extra="forbid"):
    pass

class Says:
    def reset(self, task):
        return "12>"

    def step(self, reply):
        import os
        if os.environ.get("ACME_DIES"):
            os._exit(5)
        return None, 1.0, True

def build(config, context):
    return Says()

says = Component(summary="Says.", config=Options, build="acme_says:build", isolate=True)
"""


@pytest.mark.slow
def test_one_that_asks_for_it_is_checked_in_a_process_of_its_own(install, capsys, monkeypatch):
    install("acme", {"rlhf.environments": {"acme-says": "acme_says:says"}}, {"acme_says": COMPONENT})
    assert run(["plugins", "check", "acme-says"]) == 0
    monkeypatch.setenv("ACME_DIES", "1")
    assert run(["plugins", "check", "acme-says"]) == 1
    assert "step ended its process with exit code 5" in "".join(capsys.readouterr().out.split("\n"))
