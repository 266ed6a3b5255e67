"""What the pages tell a reader to type works: run files are checked, commands parsed, Python run, data read."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from rlhf_cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    "*.md",
    "docs/*.md",
    "docs/algorithms/*.md",
    "docs/kinds/*.md",
    "libraries/*/README.md",
    "plugins/*/*/README.md",
    "recipes/**/*.md",
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = {"", "bash", "sh"}
RUN_FILE = {"model": {"path": "builtin:tiny-digits"}, "prompts": {"name": "jsonl", "path": "prompts.jsonl"}}
"""What a run file needs beside the sections that a page shows."""
PAIRS = {"prompts": {"name": "jsonl", "path": "pairs.jsonl"}}
ALGORITHMS_OF_DATASETS = {"sft", "dpo", "reward-model", "process-reward-model", "kto", "orpo", "simpo"}
BREVITY = "def brevity(rollouts, *, target_tokens: int = 8) -> list[float]:\n    return [0.0] * len(rollouts)\n"
GIVEN = {
    "prompts.jsonl": '{"prompt": "4312>", "answer": "1234"}\n',
    "sums.jsonl": '{"prompt": "1 + 2", "answer": "3"}\n',
    "train.jsonl": '{"prompt": "4312>", "completion": "1234"}\n',
    "steps.jsonl": '{"prompt": "4312>", "steps": ["12", "34"], "labels": [true, true]}\n',
    "pairs.jsonl": '{"prompt": "4312>", "chosen": "1234", "rejected": "4321", "margin": 1}\n',
    "my_reward.py": BREVITY,
    "brevity.py": BREVITY,
    "my_tools.py": "def calculator(first: float, operation: str, second: float) -> float:\n    return first\n",
    "calculator.py": "#!/usr/bin/env python\n",
    "my_hook.py": "class Recorder:\n    def __init__(self, *, path: str = 'out.csv') -> None:\n        pass\n",
}
"""Files that the pages take to be there."""
NOT_ALONE = {
    ("docs/sections.md", "safety:"): "tests/unit/config/test_plugin_sections.py installs the section and checks this",
    ("docs/requests.md", "engine:"): "tests/integration/test_request_options.py installs the engine and trains with it",
    ("docs/serve.md", "OpenAI("): "asks a server: plugins/commands/serve/tests/test_serve.py does",
    ("docs/serve.md", "Anthropic("): "asks a server: plugins/commands/serve/tests/test_serve.py does",
    (
        "docs/serve-training.md",
        "ServiceClient(",
    ): "trains on a server: plugins/commands/serve-training/tests/test_training.py does",
    ("docs/seed-classes.md", "strategy_by_name"): "goes on from a script's own actor: examples/seed are run whole",
    ("docs/algorithms/ppo.md", "PPOTrainer("): "trains: examples/seed/ppo_trainer.py is run by tests/integration",
    (
        "docs/algorithm-in-an-hour.md",
        "class MyUpdate",
    ): "a part of what `plugins new` writes, which is trained",
    ("docs/reward-in-ten-minutes.md", "rlhf_reward_brevity"): "tests what `plugins new` writes: tests/integration does",
    ("docs/plugins.md", "from .config import"): "a part of what `plugins new` writes, which is installed and trained",
    ("docs/players.md", "replay:"): "reads a recorded run: plugins/prompts/data/tests/test_replay.py makes one",
    ("docs/algorithms/policy-objective.md", "my-loss"): "names entry points of the reader's own",
}
"""(page, what the block holds) -> why it is compiled or read only, and what runs it."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_part(self) -> bool:
        return any(self.page == page and mark in self.text for page, mark in NOT_ALONE)


def blocks(*languages: str) -> list[Any]:
    found = []
    for path in (path for pattern in PATTERNS for path in sorted(ROOT.glob(pattern))):
        text = path.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            block = Block(path.relative_to(ROOT).as_posix(), match[1], match[2], text.count("\n", 0, match.start()) + 1)
            if match[1] in languages:
                found.append(pytest.param(block, id=str(block)))
    return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages take to be there, to be in."""
    for name, text in GIVEN.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for run in ("reward-model", "prm"):
        model = tmp_path / "runs" / run / "model"
        model.mkdir(parents=True)
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (model / name).touch()
        kind = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
        (model / "config.json").write_text(json.dumps(kind))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_files_of(page: str, desk: Path) -> None:
    """Python blocks that begin with their file's name."""
    for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        if name := re.match(r"# ([\w]+\.py)\n", match[2]):
            (desk / name[1]).write_text(match[2])


@pytest.mark.parametrize("block", blocks("yaml"))
def test_run_files_are_right(block: Block, desk: Path) -> None:
    save_files_of(block.page, desk)
    told = yaml.safe_load(block.text)
    assert isinstance(told, dict), "a part of a run file is a mapping"
    if block.is_part:
        return
    whole = {**RUN_FILE, **told}
    if "environment" in told and "prompts" not in told:
        del whole["prompts"]
    name = told.get("algorithm", {}).get("name")
    if name in ALGORITHMS_OF_DATASETS - {"sft"}:
        whole = {**whole, **PAIRS, **({"rewards": []} if "rewards" in told else {})}
    elif "rewards" not in told and name != "sft" and "environment" not in told:
        whole["rewards"] = [{"name": "exact-match"}]
    whole["train"] = {"samples_per_prompt": 4} | whole.get("train", {}) if "algorithm" in told else whole.get("train")
    whole = {key: value for key, value in whole.items() if value is not None}
    (desk / "run.yaml").write_text(yaml.safe_dump(whole, allow_unicode=True))
    checked = CliRunner().invoke(cli, ["config", "check", "run.yaml"], catch_exceptions=True)
    if missing := re.search(r"needs (.+?), not installed here", f"{checked.exception}"):
        pytest.skip(f"{missing[1]} is not installed")
    assert checked.exit_code == 0, f"{block}:\n{checked.output}{checked.exception!r}"


def words_of(line: str) -> list[str]:
    """As a shell would take them; a line of prose or of output is taken at its blanks."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def commands(block: Block) -> Iterator[list[str]]:
    """The lines that start rlhf, as words."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = words_of(line)
        for place, word in enumerate(words):
            if word in {"rlhf", ".venv/bin/rlhf"} and (place == 0 or words[place - 1] == "&&"):
                yield [each for each in words[place + 1 :] if each not in {"…"}]
                break


@pytest.mark.parametrize("block", [each for each in blocks(*SHELL) if list(commands(each.values[0]))])
def test_commands_exist_with_their_options(block: Block) -> None:
    for words in commands(block):
        command: click.Command = cli
        context = click.Context(cli, info_name="rlhf", **cli.context_settings)
        while isinstance(command, click.Group):
            inner = command.get_command(context, words[0])
            assert inner is not None, f"{block}: rlhf has no {words[0]}"
            command, context, words = inner, click.Context(inner, info_name=words[0], parent=context), words[1:]
        try:
            command.make_parser(context).parse_args(list(words))
        except click.UsageError as error:
            pytest.fail(f"{block}: {command.name} {' '.join(words)}: {error.format_message()}")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("block", [each for each in blocks(*SHELL) if "make " in each.values[0].text])
def test_targets_exist(block: Block) -> None:
    for line in block.text.splitlines():
        words = words_of(line)
        if words[:1] == ["make"]:
            asked = {word for word in words[1:] if "=" not in word}
            assert asked <= targets(), f"{block}: the Makefile has no {asked - targets()}"


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: Block, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(desk))
    code = compile(block.text, str(block), "exec", dont_inherit=True)
    if not block.is_part:
        exec(code, dict(NAMES))


def names() -> dict[str, Any]:
    """What the text around a block has introduced."""
    from pydantic import Field

    from rlhf_core import Section

    return {"__name__": "page", "Section": Section, "Field": Field, "Tensor": Any}


NAMES = names()


@pytest.mark.parametrize("block", blocks("toml"))
def test_toml_is_read(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", blocks("json"))
def test_json_is_read(block: Block) -> None:
    assert json.loads(block.text)


def test_what_is_not_run_is_still_there() -> None:
    """An exception for a block that is gone would let another one pass."""
    found = [each.values[0] for each in blocks("python", "yaml")]
    stale = [key for key in NOT_ALONE if not any(each.page == key[0] and key[1] in each.text for each in found)]
    assert not stale
