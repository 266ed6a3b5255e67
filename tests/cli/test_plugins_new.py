"""`rlhf plugins new`: what it writes, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from running import PATIENCE_SECONDS

from rlhf_cli.commands.plugins import _kind
from rlhf_cli.main import run
from rlhf_cli.scaffold import TEMPLATES, new_plugin
from rlhf_core.components import KINDS, EngineContext
from rlhf_core.errors import PluginError, UserInputError
from rlhf_core.protocols import RolloutEngine
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_testing.models import tiny_model, tiny_tokenizer


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_a_template_for_every_kind():
    whole_on_a_page = {"models"}  # docs/kinds/models.md
    assert set(TEMPLATES) == {*KINDS, "advantages", "policy_losses"} - whole_on_a_page


@pytest.mark.parametrize("spelling", ["reward", "rewards", "Reward"])
def test_it_writes_a_distribution_and_says_what_is_next(here, capsys, spelling):
    assert run(["plugins", "new", spelling, "two-words"]) == 0
    said = capsys.readouterr().out
    folder = here / "rlhf-reward-two-words"
    assert f"wrote {folder.name}/pyproject.toml" in said.replace(f"{here}/", "")
    assert "pip install -e" in said.splitlines()[-1]
    source = (folder / "src/rlhf_reward_two_words/reward.py").read_text()
    assert "def two_words(rollouts" in source
    entry = '[project.entry-points."rlhf.rewards"]\ntwo-words = "rlhf_reward_two_words.reward:two_words"'
    assert entry in (folder / "pyproject.toml").read_text()


def test_a_reward_needs_nothing_from_us(tmp_path):
    """Neither an import nor a dependency; about ten lines."""
    folder, _ = new_plugin("rewards", "brief", tmp_path / "brief")
    source = (folder / "src/rlhf_reward_brief/reward.py").read_text()
    assert "rlhf" not in source
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
    assert "dependencies = []" in (folder / "pyproject.toml").read_text()


def test_an_engine_is_one_that_environments_can_be_played_with(tmp_path, monkeypatch):
    folder, _ = new_plugin("engines", "two-words", tmp_path / "new")
    monkeypatch.syspath_prepend(str(folder / "src"))
    module, config = (import_module(f"rlhf_engine_two_words.{name}") for name in ("engine", "config"))
    model = tiny_model()
    context = EngineContext(model=model, tokenizer=tiny_tokenizer(), device=model.device, seed=1)
    engine = module.build(config.TwoWordsConfig(), context)
    assert isinstance(engine, RolloutEngine) and (engine.eos_token_ids, engine.context_tokens) == ({2}, 4096)
    asked = [GenerationRequest(sample_id=5, prompt_ids=(7, 8), branch=b, offset=o) for b, o in ((0, 0), (1, 0), (2, 9))]
    found = {each.branch: each.token_ids for each in engine.generate(asked, SamplingParams(max_new_tokens=12))}
    assert sorted(found) == [0, 1, 2] and len(set(found.values())) == 3


@pytest.mark.parametrize("kind", list(TEMPLATES))
def test_nothing_is_left_to_fill_in(tmp_path, kind):
    folder, files = new_plugin(kind, "two-words", tmp_path / "new")
    for path in files:
        text = (folder / path).read_text()
        assert "{{" not in text and not re.search("__(package|snake|tests)__", str(path)), path
    assert Path("tests/test_two_words.py") in files
    assert yaml.safe_load((folder / "run.yaml").read_text())["model"]["path"] == "builtin:tiny-digits"


def test_all_of_it_is_tidy(tmp_path):
    """What we hand out is formatted and linted as our own code is."""
    for kind in TEMPLATES:
        new_plugin(kind, "two-words", tmp_path / kind)
    ruff = Path(sys.executable).parent / "ruff"
    rules = ["--select", "E,F,W,I,UP,B,SIM,C4,D100,D101"]
    for arguments in (["check", "--no-cache", *rules, "."], ["format", "--no-cache", "--check", "."]):
        done = subprocess.run(
            [str(ruff), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rewad", "x"], 'no plugin kind "rewad"; did you mean "rewards"?'),
        (["command", "x"], 'no template for plugins of kind "commands"'),
        (["reward", "Two Words"], "must be lowercase letters, digits and single dashes"),
        (["reward", "2nd"], "must be lowercase letters"),
        (["reward", "../up"], "must be lowercase letters"),
        (["reward", "lambda"], "is a keyword of Python"),
        (["reward", "exact-match"], "is taken by rlhf-reward-rules"),
        (["algorithm", "grpo"], "is taken by rlhf-group"),
    ],
)
def test_what_cannot_be_is_refused(here, capsys, arguments, message):
    assert run(["plugins", "new", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_nothing_is_overwritten(here, capsys):
    (here / "mine").mkdir()
    (here / "mine" / "notes.txt").write_text("keep")
    assert run(["plugins", "new", "reward", "x", "--output", "mine"]) == 2
    assert "mine: already exists" in capsys.readouterr().err
    assert [path.name for path in (here / "mine").iterdir()] == ["notes.txt"]
    with pytest.raises(UserInputError, match="already exists"):
        new_plugin("rewards", "x", here / "mine" / "notes.txt")


def test_an_empty_folder_will_do(here):
    (here / "mine").mkdir()
    assert run(["plugins", "new", "hooks", "x", "--output", "mine"]) == 0
    assert (here / "mine" / "run.yaml").is_file()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("algorithm", "algorithms"),
        ("Strategies", "strategies"),
        ("strategy", "strategies"),
        ("prompts", "prompts"),
        ("prompt", "prompts"),
        ("hook", "hooks"),
        ("commands", "commands"),
    ],
)
def test_kinds_are_said_in_singular_or_plural(text, kind):
    assert _kind(text) == kind


def test_unknown_kind_is_an_error():
    with pytest.raises(PluginError, match='no plugin kind "rewardz"; did you mean "rewards"'):
        _kind("rewardz")
