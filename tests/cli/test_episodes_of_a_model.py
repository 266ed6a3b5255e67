"""`rlhf eval` and `rlhf generate` with `--environment` play episodes."""

from __future__ import annotations

import json

import pytest

from rlhf_cli.main import run
from rlhf_core.plugins import discovery

GAME = '''
class Count:
    """Say digits; rewarded for a right one."""

    def __init__(self, *, goal: int = 7):
        self.goal = goal

    def reset(self, task):
        return f"{task.seed % 10}>" if not task.prompt.text else None

    def step(self, reply):
        found = str(self.goal) in reply.text
        return "3\\x1b4>", float(found), False
'''
MODEL = ["--model", "builtin:tiny-digits", "--max-new-tokens", "4", "--device", "cpu"]


@pytest.fixture
def game(tmp_path):
    path = tmp_path / "game.py"
    path.write_text(GAME.replace("\x1b", "\\x1b"))
    return ["--environment", f"{path}:Count", "--set", "environment.max_turns=2"]


def test_an_evaluation_has_the_environments_reward_and_turns(game, capsys):
    assert run(["eval", *MODEL, *game, "--num-prompts", "5", "--temperature", "1", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert next(iter(scores)) == "environment" and 0 <= scores["environment"] <= 2
    assert (scores["environment/num_turns_mean"], scores["environment/truncated_fraction"]) == (2.0, 1.0)
    assert (scores["num_prompts"], scores["num_scored"]) == (5.0, 5.0)


def test_an_evaluation_takes_prompts_and_rewards_of_its_own(game, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "12>", "answer": "12"}\n' * 3)
    prompts = ["--prompts", str(tmp_path / "prompts.jsonl"), "--reward", "length"]
    assert run(["eval", *MODEL, *game, *prompts, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert list(scores)[:2] == ["environment", "length"] and scores["num_scored"] == 3.0


def test_generate_prints_an_episode_turn_by_turn(game, capsys):
    assert run(["generate", *MODEL, *game, "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reward: environment ")
    assert [line.split("  reward")[0] for line in lines if not line.startswith(("  >", "    ", "reward"))] == [
        "  policy",
        "  environment",
        "  policy",
    ]
    assert r"  > 3\x1b4>" in lines
    assert run(["generate", *MODEL, *game, "--prompt", "45>", "--prompt", "6>", "--json"]) == 0
    episodes = json.loads(capsys.readouterr().out)
    assert [each["prompt"] for each in episodes] == ["45>", "6>"]
    assert [turn["role"] for turn in episodes[0]["turns"]] == ["policy", "environment", "policy"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", *MODEL], "specify a prompt"),
        (["eval", *MODEL], "specify prompts"),
        (["generate", *MODEL, "--prompt", "1>", "--set", "environment.max_turns=2"], "needs --environment NAME"),
        (["generate", *MODEL, "--environment", "game.py:Count", "--set", "train.seed=2"], "only options of engine"),
        (["generate", *MODEL, "--prompt", "1>", "--set", "engine.topk=2"], 'did you mean "top_k"?'),
        (["eval", *MODEL, "--environment", "./nowhere.py:Count"], "no such file"),
    ],
)
def test_what_cannot_be_played_is_the_users_mistake(arguments, told, capsys):
    assert run(arguments) == 2
    assert told in capsys.readouterr().err


def test_an_unknown_option_of_the_environment_is_named(game, capsys):
    assert run(["eval", *MODEL, *game, "--set", "environment.gaol=3"]) == 2
    assert 'did you mean "goal"?' in capsys.readouterr().err


def test_generate_needs_no_plugin_but_the_engine(monkeypatch, capsys):
    installed = {
        kind: refs for kind, refs in discovery._installed().items() if kind in ("engines", "models", "prompts")
    }
    installed["transports"] = {"local": discovery.discover("transports")["local"]}
    monkeypatch.setattr(discovery, "_installed", lambda: installed)
    assert run(["generate", *MODEL, "--prompt", "31>", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
