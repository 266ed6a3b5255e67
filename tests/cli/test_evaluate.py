"""`rlhf eval`: which run it makes of its arguments."""

import json

import pytest

from rlhf_cli.main import run

pytestmark = pytest.mark.usefixtures("fake_plugins")


def test_eval_scores_with_the_rewards_named(monkeypatch, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text("{}\n")
    asked = {}

    def evaluate_run(run, *, where, trust):
        asked.update(run)
        return {f"eval/{reward['name']}": reward["weight"] for reward in run["rewards"]}

    monkeypatch.setattr("rlhf_cli.answers.evaluate_run", evaluate_run)
    arguments = ["eval", "--model", "m", "--prompts", str(tmp_path / "p.jsonl"), "--num-prompts", "3"]
    rewards = ["--reward", "fake-shout:0.5", "--reward", "fake-whisper", "--set", "rewards.0.loudness=7"]
    assert run([*arguments, *rewards, "--set", "eval.samples_per_prompt=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"fake-shout": 0.5, "fake-whisper": 1.0}
    assert asked["rewards"][0] == {"name": "fake-shout", "weight": 0.5, "loudness": 7}
    assert (asked["model"]["path"], asked["eval"]["num_prompts"], asked["eval"]["samples_per_prompt"]) == ("m", 3, 4)
    assert asked["engine"]["max_new_tokens"] == 128, "without a run file the defaults of the flags hold"


def test_eval_of_a_run_file_changes_what_flags_name_only(monkeypatch, capsys, tmp_path):
    asked = {}

    def evaluate_run(run, *, where, trust):
        asked.update(run)
        return {"eval/easy/score": 0.5}

    monkeypatch.setattr("rlhf_cli.answers.evaluate_run", evaluate_run)
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: start}\nengine: {max_new_tokens: 9, top_k: 3}\neval: {num_prompts: 5}\n")
    assert run(["eval", str(file), "--model", "m", "--set", "engine.top_k=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"eval/easy/score": 0.5}
    assert asked["engine"] == {"max_new_tokens": 9, "top_k": 4}
    assert (asked["model"]["path"], asked["eval"]) == ("m", {"num_prompts": 5})
    assert run(["eval"]) == 2
    assert "specify a model" in capsys.readouterr().err
