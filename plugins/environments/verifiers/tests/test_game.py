"""With the library itself: the contract, whole runs, and episodes that fail."""

import json
import logging
import os

import pytest
from game_play import observations, play
from running import wait_until

from rlhf_core import train
from rlhf_core.errors import ConfigError, EpisodeError
from rlhf_env_verifiers.config import VerifiersConfig
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.episodes import episode_tokenizer
from rlhf_testing.models import tiny_model
from rlhf_testing.runs import tiny_run

pytest.importorskip("verifiers", reason="needs verifiers: make env-clients")

pytestmark = pytest.mark.slow


class TestGame(EnvironmentContract):
    plugin = "verifiers"
    options = {"env": "number-game", "args": {"highest": 2}}
    replies = ("0", "1", "2", "many")


@pytest.fixture(autouse=True)
def no_key_is_left():
    """Whatever became of its episodes."""
    yield
    wait_until(lambda: not [name for name in os.environ if "EPISODE_API_KEY" in name], "the keys are gone")


def test_an_episode_to_its_end():
    (played,) = play("7", "no", "0", num_tasks=1)
    (row,) = played.rows
    assert row.text == "system: Find it.<eos>\nuser: Guess.<eos>\nassistant: "
    assert observations(played) == ["lower", "A number?"]
    assert played.reward == 2.5
    own = {key: value for key, value in played.rows[0].columns["environment"].items() if key.startswith("own/")}
    assert own == {"own/found": 1.0, "own/is_number": 1.0, "own/guesses": 3.0}
    assert (played.rows[0].columns["environment"]["num_turns"], played.rows[0].columns["environment"]["truncated"]) == (
        3.0,
        0.0,
    )


def test_episodes_take_the_tasks_by_their_seeds():
    found = [each.reward for each in play("3", samples=40, max_turns=1, args={"highest": 3})]
    assert set(found) == {0.5, 2.5}


FORGIVING = {"agent": {"harness": {"takes_refusals": True}}}


@pytest.mark.parametrize(
    ("bound", "reward"),
    [
        ({"max_turns": 2}, 0.5),
        ({"agent": {"max_total_tokens": 70}}, 0.5),
        ({"context_tokens": 80, **FORGIVING}, 0.5),
        ({"context_tokens": 80}, 0.0),
        ({"max_tokens": 30}, 0.0),
    ],
)
def test_a_bound_truncates_what_verifiers_scores_where_its_harness_ends_well(bound, reward):
    (played,) = play("9", num_tasks=1, max_turns=bound.pop("max_turns", 50), **bound)
    assert (played.reward, played.rows[0].columns["environment"]["truncated"]) == (reward, 1.0)
    assert played.rows[0].columns["environment"]["num_turns"] > 1


def test_a_rollout_that_fails(caplog):
    with pytest.raises(EpisodeError, match=r"run raised RolloutFailed: TaskError: .*ArithmeticError: out of luck"):
        play("13")
    (dropped,) = play("13", on_failure="drop")
    assert dropped.rows == ()
    (zero,) = play("13", on_failure="zero")
    assert (zero.reward, zero.rows[0].columns["environment"]["failed"]) == (0.0, 1.0)


def test_time_that_verifiers_bounds():
    with pytest.raises(EpisodeError, match="RolloutFailed: verifiers reported scoring_timeout"):
        play("1", num_tasks=1, max_turns=1, args={"task": {"seconds": 1000}}, agent={"timeout": {"scoring": 0.2}})


def test_a_harness_that_hangs():
    with pytest.raises(EpisodeError, match=r"did not return within 0.5 s"):
        play("1", timeout_seconds=0.5, agent={"harness": {"seconds": 1000}})


def test_the_key_is_in_no_log(caplog, monkeypatch):
    from rlhf_env_verifiers import environment

    caplog.set_level(logging.DEBUG)
    keys, variable = [], environment._key_variable

    def noting(key):
        keys.append(key)
        return variable(key)

    monkeypatch.setattr(environment, "_key_variable", noting)
    play("13", samples=2, on_failure="zero")
    assert len(keys) == 2 and "rollout start" in caplog.text
    assert not [key for key in keys if key in caplog.text]


@pytest.mark.parametrize(
    ("options", "said", "where"),
    [
        ({"env": "no-such-game"}, "cannot load the environment no-such-game: ModuleNotFound", "env"),
        ({"env": "json"}, "cannot load the environment json: TypeError: ", "env"),
        ({"env": "two-agents"}, r"two-agents has 2 agents \(asker, solver\)", "env"),
        ({"args": {"lowest": 1}}, "does not accept these options: lowest: ", "args"),
        ({"agent": {"harness": {"id": "no-such"}}}, "harness 'no-such' not found", "agent"),
        ({"agent": {"harness": "bash"}}, "agent", "agent"),
        ({"agent": {"harness": {"id": "bash"}}}, "the harness bash runs code written by the model", "agent.runtime"),
        ({"agent": {"runtime": {"type": "moon"}}}, "agent.runtime: ", "agent"),
        ({"args": {"endless": True}}, "is infinite", "num_tasks"),
        ({"args": {"highest": -1}}, "has zero tasks", "args"),
        ({"args": {"highest": "x"}}, "highest: ", "args"),
        ({"records": [{"prompt": [{"role": "user", "content": "Go."}]}]}, "provides its own prompts", None),
    ],
)
def test_what_no_episode_mends_ends_the_run(options, said, where):
    with pytest.raises(ConfigError, match=said) as raised:
        play("1", on_failure="drop", **options)
    assert raised.value.hint and raised.value.where == ("prompts" if where is None else f"environment.{where}")


@pytest.mark.parametrize(
    ("agent", "found"),
    [
        ({}, ("bash", "docker", "games")),
        ({"runtime": {"type": "docker", "image": "mine"}}, ("bash", "docker", "mine")),
        ({"harness": {"id": "null"}}, ("null", "docker", "games")),
    ],
)
def test_what_an_environment_says_of_its_agent_is_left(agent, found):
    from rlhf_env_verifiers.loading import load

    player = load(VerifiersConfig(env="pinned-game", agent=agent)).config.player
    assert (player.harness.id, player.runtime.type, player.runtime.image) == found


def test_some_of_tasks_without_end():
    assert len(play("1", samples=3, args={"endless": True}, num_tasks=2)) == 3


def test_a_model_without_a_chat_template_is_told():
    with pytest.raises(EpisodeError, match="chat"):
        play("1", chat=False)


@pytest.fixture
def chat_model(tmp_path):
    """A model of random weights with a chat template."""
    tokenizer = episode_tokenizer(chat=True)
    model = tiny_model(tokenizer, hidden_size=16, num_layers=1, num_heads=2, seed=0)
    model.config.max_position_embeddings = 1024
    for saved in (tokenizer, model):
        saved.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_it_trains(tmp_path, chat_model, algorithm):
    changes = {
        "model": {"path": chat_model},
        "algorithm": {"name": algorithm},
        "environment": {"name": "verifiers", "env": "number-game", "max_turns": 3},
        "prompts": {"name": "tasks"},
        "rewards": [],
        "logging": {"samples": "all"},
    }
    result = train(tiny_run(changes), output=tmp_path / "run")
    assert result.summary["status"] == "done"
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and all(sample["prompt"].endswith("user: Guess.<eos>\nassistant: ") for sample in samples)
    assert {sample["rewards"]["environment"] for sample in samples} <= {0.0, 0.5, 2.5}
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"environment/found", "environment/is_number", "environment/guesses"} <= set(line)
    written = "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert "RLHF_EPISODE_API_KEY" not in written
