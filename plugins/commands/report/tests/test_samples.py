"""`rlhf samples`: a run's answers in the terminal."""

import fcntl
import json

import pytest

from rlhf_cli.main import run


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text("")
    lines = [
        {
            "sample_id": number,
            "episode": number // 4,
            "policy_version": number // 4,
            "prompt": f"prompt {number}\nsecond line",
            "completion": "\x1b[2Jboo" if number == 7 else f"answer {number}",
            "rewards": {"exact": number / 8},
            "score": number / 8,
            "finish_reason": "stop",
            "num_tokens": 3,
        }
        for number in range(8)
    ]
    (path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_groups_are_shown_with_their_rewards(folder, capsys):
    assert run(["samples", str(folder), "--number", "1"]) == 0
    said = capsys.readouterr().out
    for heading in ("BEST", "WORST", "RANDOM", "FIRST", "LAST"):
        assert f"\n{heading}\n" in said
    assert (
        "#0  episode 1  policy 0  weighted score 0  exact 0  3 tokens  stop\n"
        "  > prompt 0\n  > second line\n    answer 0" in said
    )


def test_a_run_without_samples_says_why(folder, capsys):
    (folder / "samples.jsonl").unlink()
    assert run(["samples", str(folder)]) == 2
    assert "has not written samples\n  -> runs that train on a dataset do not sample" in capsys.readouterr().err


def test_a_run_in_its_first_seconds_has_no_samples_yet(folder, capsys):
    (folder / "samples.jsonl").unlink()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(["samples", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "the run is in progress and has not written samples yet\n  -> try again after an episode (" in said


def test_control_characters_of_an_answer_do_not_reach_the_terminal(folder, capsys):
    run(["samples", str(folder), "--show", "best", "--number", "1"])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert r"\x1b[2Jboo" in said


def test_an_episode_of_an_environment_is_shown_turn_by_turn(folder, capsys):
    turns = [
        {"role": "policy", "text": "4\x1b[2J", "reward": 0.5, "tool_calls": [{"name": "add", "arguments": {"b": 1}}]},
        {"role": "environment", "text": "higher\nthan 4"},
        {
            "role": "policy",
            "text": "{",
            "reward": 1.0,
            "tool_calls": [{"name": "", "arguments": {}, "error": "no JSON"}],
        },
    ]
    line = {"sample_id": 8, "episode": 1, "policy_version": 1, "prompt": "guess", "completion": "4\n7", "score": 2.0}
    line |= {"rewards": {"environment": 1.5}, "finish_reason": "stop", "num_tokens": 4, "branch": 1, "turns": turns}
    with (folder / "samples.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert run(["samples", str(folder), "--show", "best", "--number", "1"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[3:] == [
        "#8 branch 1  episode 2  policy 1  weighted score 2  environment 1.5  4 tokens  stop",
        "  > guess",
        "  policy, turn 1  reward 0.5",
        r"    4\x1b[2J",
        '    calls add {"b": 1}',
        "  environment",
        "  > higher",
        "  > than 4",
        "  policy, turn 2  reward 1",
        "    {",
        "    bad call: no JSON",
    ]


def test_one_episode_as_json(folder, capsys):
    assert run(["samples", str(folder), "--episode", "1", "--show", "best", "--number", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["sample_id"] for line in found["best"]] == [3, 2]
    assert list(found) == ["best"]


def test_no_samples_is_the_users_mistake(folder, tmp_path, capsys):
    assert run(["samples", str(folder), "--episode", "9"]) == 2
    assert "none of the samples match" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(["samples", str(tmp_path / "empty")]) == 2
