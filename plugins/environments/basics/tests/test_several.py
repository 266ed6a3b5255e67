"""Several environments in one run: who plays what, with which options, and what is reported."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core import train
from rlhf_core.config.problems import Problems
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, DataError, EpisodeError
from rlhf_core.rollout.episode_metrics import environment_metrics
from rlhf_core.types import SamplingParams
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_episodes.several import Shares
from rlhf_testing.contracts import EnvironmentContract
from rlhf_testing.engine import FakeEngine
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.runs import tiny_run
from rlhf_testing.samples import make_prompt

GAMES = """
from rlhf_core import Column


class Turns:
    \"\"\"Ends after `turns`, each of which earns `reward`.\"\"\"

    def __init__(self, *, turns: int = 2, reward: float = 1.0):
        self.turns, self.reward, self.played = turns, reward, 0
        self.metrics = {"wins": reward}

    def reset(self, task):
        return ">"

    def step(self, reply):
        self.played += 1
        return ">", self.reward, self.played == self.turns


class Clashes(Turns):
    def __init__(self):
        super().__init__(turns=1)
        self.metrics = {"share": 0.5}


class Fails:
    def reset(self, task):
        return ">"

    def step(self, reply):
        raise RuntimeError("no game")


class States:
    columns = {"field": Column(dtype="int64")}

    async def run(self, task, policy): ...


class Nothing: ...


def long(rollouts, *, scale: float = 1.0):
    return [scale * len(rollout.sampled_ids) for rollout in rollouts]


def of_turns(rollouts):
    return [{0: 10.0} for rollout in rollouts]


def drops(rollouts):
    return [float("nan") for rollout in rollouts]
"""


@pytest.fixture
def games(tmp_path: Path) -> str:
    (tmp_path / "games.py").write_text(GAMES)
    return f"{tmp_path}/games.py"


def play(section: dict[str, Any], *, prompts: int = 6, samples: int = 2, records: Any = None) -> list[Any]:
    problems = Problems()
    environment = resolve_environment({"name": "several", **section}, problems)
    problems.raise_if_any("environment")
    assert environment is not None
    player = build_environment_player(
        environment, FakeEngine(), tiny_tokenizer(), sampling=SamplingParams(max_new_tokens=4), seed=3
    )
    given = [
        replace(make_prompt(number), metadata={} if records is None else records[number]) for number in range(prompts)
    ]
    with closing(player):
        found = player.play([(each, each.position * samples + k) for each in given for k in range(samples)])
        return sorted(found, key=lambda each: each.sample_id)


def measured(played: Any) -> dict[str, float]:
    return dict(played.rows[0].columns["environment"])


# Shares


shares = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.05, 20), min_size=1, max_size=6)


@given(shares, st.integers(0, 2**40), st.integers(0, 2**31))
def test_each_environment_gets_its_share_of_any_consecutive_prompts(
    shares: dict[str, float], first: int, seed: int
) -> None:
    assigned = Shares(shares, seed)
    number = 1000
    found = [assigned.at(position) for position in range(first, first + number)]
    for label, share in shares.items():
        assert abs(found.count(label) - number * share / sum(shares.values())) < 12


@given(shares, st.lists(st.integers(0, 2**60), max_size=20), st.integers(0, 2**31))
def test_the_assignment_depends_on_nothing_but_seed_and_position(
    shares: dict[str, float], positions: list[int], seed: int
) -> None:
    in_order = [Shares(shares, seed).at(position) for position in positions]
    again = Shares(shares, seed)
    assert [again.at(position) for position in reversed(positions)] == in_order[::-1]


@given(shares, st.integers(0, 2**31))
def test_shares_count_relative_to_each_other(shares: dict[str, float], seed: int) -> None:
    doubled = Shares({label: 2 * share for label, share in shares.items()}, seed)
    one = Shares(shares, seed)
    assert all(one.at(position) == doubled.at(position) for position in range(100))


def test_equal_shares_do_not_alias_with_the_tasks() -> None:
    """Tasks are often numbered by position: each environment must see all of them."""
    assigned = Shares({"a": 1.0, "b": 1.0}, 0)
    for period in (2, 3, 4, 5, 8, 10):
        seen = {position % period for position in range(200) if assigned.at(position) == "a"}
        assert seen == set(range(period))


# Episodes


def test_a_group_faces_one_environment_with_its_own_options(games: str) -> None:
    of = {
        "short": {"name": f"{games}:Turns", "turns": 9, "max_turns": 2, "share": 2},
        "long": {"name": f"{games}:Turns", "options": {"turns": 9, "reward": 0.5}, "weight": 2.0},
    }
    played = play({"of": of, "max_turns": 3}, prompts=30)
    labels = [each.prompt.metadata["environment"] for each in played]
    assert labels[::2] == labels[1::2] and abs(labels.count("short") - 40) <= 4
    for each, label in zip(played, labels, strict=True):
        turns = 2 if label == "short" else 3
        assert len(each.rows[0].own_turns) == turns
        assert each.reward == turns and each.turn_rewards == dict.fromkeys(range(turns), 1.0)
        assert measured(each)["own/short/share"] == (label == "short")


def test_metrics_of_each_environment_are_means_over_its_episodes(games: str) -> None:
    of = {"one": {"name": f"{games}:Turns", "turns": 1}, "two": {"name": f"{games}:Turns", "reward": 0.25, "weight": 4}}
    records = [{"kind": "one"}] * 2 + [{"kind": "two"}] * 4
    metrics = environment_metrics([measured(each) for each in play({"of": of, "by": "kind"}, records=records)])
    expected = {
        "environment/num_turns_mean": 10 / 6,
        "environment/one/share": 1 / 3,
        "environment/two/share": 2 / 3,
        "environment/one/num_turns_mean": 1.0,
        "environment/two/num_turns_mean": 2.0,
        "environment/one/reward": 1.0,
        "environment/two/reward": 2.0,
        "environment/two/reward/environment": 0.5,
        "environment/one/wins": 1.0,
        "environment/two/wins": 0.25,
        "environment/two/truncated_fraction": 0.0,
        "environment/two/failed_fraction": 0.0,
        "environment/one/bad_tool_calls_mean": 0.0,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)
    assert "environment/wins" not in metrics


def test_a_metric_with_a_name_that_is_taken_is_kept_apart(games: str) -> None:
    for each in play({"of": {"a": f"{games}:Clashes"}}):
        assert (measured(each)["own/a/share"], measured(each)["own/a/own/share"]) == (1.0, 0.5)


def test_rewards_are_part_of_the_environments_own(games: str) -> None:
    of = {
        "judged": {
            "name": f"{games}:Turns",
            "rewards": [
                {"name": f"{games}:long", "scale": 0.5, "weight": 3.0, "label": "length"},
                f"{games}:of_turns:0.1",
            ],
            "weight": 2.0,
        },
        "plain": {"name": f"{games}:Turns"},
    }
    records = [{"kind": ("judged", "plain")[number % 2]} for number in range(6)]
    for each in play({"of": of, "by": "kind"}, records=records):
        values = measured(each)
        if each.prompt.metadata["kind"] == "plain":
            assert each.reward == 2.0 and "own/plain/reward/length" not in values
            continue
        tokens = sum(map(sum, (row.mask for row in each.rows)))
        assert values["own/judged/reward/length"] == 0.5 * tokens
        assert values["own/judged/reward/of_turns"] == 10.0
        assert each.reward == pytest.approx(2 * (2.0 + 3 * 0.5 * tokens + 0.1 * 10)) == values["own/judged/reward"]
        assert each.turn_rewards == pytest.approx({0: 2 * (1.0 + 1.0), 1: 2.0})


def test_a_reward_may_drop_an_episode(games: str) -> None:
    of = {"judged": {"name": f"{games}:Turns", "rewards": [{"name": f"{games}:drops", "on_failure": "drop"}]}}
    assert all(each.rows == () for each in play({"of": of}))


def test_the_calls_of_an_environments_rewards_are_counted(games: str, tmp_path: Path) -> None:
    run = by_kind(FINE, tmp_path, rewards=[{"name": f"{games}:long", "label": "all"}])
    drops = [{"name": f"{games}:drops", "on_failure": "drop"}]
    run["environment"]["of"] = {"games": {"name": "guess-number", "rewards": drops}, "more": "guess-number"}
    result = train(run, output=tmp_path / "run")
    assert result is not None
    costs = {key: sum(line.get(key, 0.0) for line in result.metrics) for line in result.metrics for key in line}
    assert costs["reward_calls/games/drops/calls"] > 0 and costs["reward_calls/all/calls"] > 0
    assert costs["reward_calls/games/drops/dropped"] > 0
    assert not any(key.startswith("reward_calls/more/") for key in costs)


def test_an_environment_fails_by_its_own_policy_and_name(games: str) -> None:
    broken = {"name": f"{games}:Fails", "on_failure": "zero"}
    records = [{"kind": ("broken", "fine")[number % 2]} for number in range(4)]
    section = {"of": {"broken": broken, "fine": f"{games}:Turns"}, "by": "kind"}
    played = play(section, prompts=4, records=records)
    assert [each.reward for each in played] == [0.0, 0.0, 2.0, 2.0] * 2
    assert environment_metrics([measured(each) for each in played])["environment/broken/failed_fraction"] == 1.0
    del broken["on_failure"]
    with pytest.raises(EpisodeError, match=r"environment broken \(Fails\), sample \d: step raised .*no game"):
        play(section, prompts=4, records=records)


def test_concurrency_is_that_of_each_environment(games: str) -> None:
    section = {"of": {"a": {"name": f"{games}:Turns", "concurrency": 1}, "b": f"{games}:Turns"}, "by": "kind"}
    records = [{"kind": ("a", "b")[number % 2]} for number in range(8)]
    problems = Problems()
    environment = resolve_environment({"name": "several", **section}, problems)
    engine = FakeEngine()
    assert environment is not None
    player = build_environment_player(
        environment, engine, tiny_tokenizer(), sampling=SamplingParams(max_new_tokens=4), seed=0
    )
    with closing(player):
        samples = [(replace(make_prompt(number), metadata=records[number]), number) for number in range(8)]
        assert len(list(player.play(samples))) == 8
    in_round = [[request.sample_id % 2 for request in call] for call in engine.calls]
    assert max(part.count(0) for part in in_round) == 1 and max(part.count(1) for part in in_round) == 4
    assert any({0, 1} == set(part) for part in in_round), "turns of all environments share a batch"


def test_isolated_environments_have_their_own_processes(games: str) -> None:
    of = {"here": f"{games}:Turns", "there": {"name": f"{games}:Turns", "isolate": True}}
    records = [{"kind": ("here", "there")[number % 2]} for number in range(4)]
    played = play({"of": of, "by": "kind"}, prompts=4, records=records)
    assert [each.reward for each in played] == [2.0] * 8


class TestSeveralKeepsTheContract(EnvironmentContract):
    plugin = "several"
    options = {"of": {"games": {"name": "guess-number", "share": 2}, "more": {"name": "guess-number", "numbers": 5}}}
    replies = ("3", "7")
    chat = False


# Options


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"environment\.of: is required"),
        ({"of": {}}, r"environment\.of: .*should have at least 1"),
        ({"of": {"a b": "guess-number"}}, r"a name has letters, digits"),
        ({"of": {"a": "guess-numbre"}}, r'environment\.of\.a\.name: no environment .*did you mean "guess-number"'),
        ({"of": {"a": {"name": "guess-number", "numbres": 3}}}, r'of\.a\.numbres: unknown key; did you mean "numbers"'),
        ({"of": {"a": {"name": "guess-number", "max_turns": 0}}}, r"of\.a\.max_turns: should be at least 1|greater"),
        (
            {"of": {"a": {"name": "guess-number", "max_turn": 2}}},
            r'of\.a\.max_turn: is not .* did you mean "max_turns"',
        ),
        ({"of": {"a": {"name": "guess-number", "share": 2}}, "by": "kind"}, r"a: remove its share"),
        ({"of": {"a": {"name": "guess-number", "rewards": ["long-answers"]}}}, r"of\.a\.rewards\.0\.name: no reward"),
        (
            {"of": {"a": {"name": "guess-number", "rewards": ["length", "length"]}}},
            r'of\.a\.rewards: two rewards are named "length"',
        ),
        (
            {"of": {"a": {"name": "guess-number", "rewards": [{"name": "length", "label": "environment"}]}}},
            r'of\.a\.rewards: "environment" is a reserved name',
        ),
        ({"of": {"a": {"name": "several", "of": {"b": "guess-number"}}}}, r"of\.a\.name: is several, which cannot be"),
        ({"of": {"a": "GAMES:Nothing"}}, r"of\.a\.name: Nothing is not an environment"),
        ({"of": {"a": "GAMES:States"}}, r"of\.a\.name: declares the column field"),
    ],
)
def test_wrong_options_are_reported_with_their_place(section: dict[str, Any], message: str, games: str) -> None:
    for label, entry in section.get("of", {}).items():
        if isinstance(entry, str):
            section = {"of": {label: entry.replace("GAMES", games)}}
    run = tiny_run({"environment": {"name": "several", **section}, "prompts": None, "rewards": None})
    with pytest.raises(ConfigError, match=message):
        resolve(run)


def test_a_resolved_run_comes_back_from_its_file(games: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    of = {
        "games": {"name": "guess-number", "numbers": 5, "share": 2, "rewards": ["./games.py:long:0.5"]},
        "own": {"name": "./games.py:Turns", "turns": 3, "retries": 1},
    }
    run = tiny_run({"environment": {"name": "several", "of": of, "max_turns": 3}, "prompts": None, "rewards": None})
    resolved = resolve(run).to_mapping()
    entry = resolved["environment"]["of"]["own"]
    assert entry["name"] == f"{games}:Turns" and entry["options"] == {"turns": 3} and entry["max_turns"] is None
    assert resolved["environment"]["of"]["games"]["rewards"][0]["name"] == f"{games}:long"
    assert resolve(resolved).to_mapping() == resolved


# Records


def by_kind(records: list[dict[str, Any]], folder: Path, **changes: Any) -> dict[str, Any]:
    import json

    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    of = {"games": "guess-number", "more": {"name": "guess-number", "numbers": 5}}
    return tiny_run(
        {
            "environment": {"name": "several", "of": of, "by": "kind", "max_turns": 2},
            "prompts": {"name": "jsonl", "path": str(path)},
            "engine": {"max_new_tokens": 2},
            "rewards": None,
            **changes,
        }
    )


FINE = [{"prompt": ">,", "answer": number % 5, "kind": ("games", "more")[number % 2]} for number in range(8)]


def test_a_record_without_the_key_or_with_an_unknown_name_is_an_error_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl.*:9: `kind` is missing.*") as error:
        train(by_kind([*FINE, {"prompt": ">,"}], tmp_path), dry_run=True)
    assert "games, more" in str(error.value)
    with pytest.raises(DataError, match=r'prompts\.jsonl.*:9: `kind` is \'game\'.* did you mean "games"'):
        train(by_kind([*FINE, {"prompt": ">,", "kind": "game"}], tmp_path), dry_run=True)
    wrong = [{"prompt": ">,", "kind": number} for number in range(7)]
    with pytest.raises(DataError, match=r"7 records are wrong") as error:
        train(by_kind([*FINE, *wrong], tmp_path), dry_run=True)
    assert "jsonl:9" in str(error.value) and "and 2 more" in str(error.value)
    assert train(by_kind(FINE, tmp_path), dry_run=True) is None


def test_evaluation_sets_of_each_and_one_curriculum(tmp_path: Path) -> None:
    sets = {
        kind: {"prompts": {"name": "jsonl", "path": f"{tmp_path}/{kind}.jsonl"}, "num_prompts": 2}
        for kind in ("games", "more")
    }
    import json

    for kind in sets:
        record = {"prompt": ">,", "answer": 1, "kind": kind}
        (tmp_path / f"{kind}.jsonl").write_text(2 * (json.dumps(record) + "\n"))
    run = by_kind(FINE, tmp_path, eval={"sets": sets, "every_episodes": 1})
    run["prompts"]["curriculum"] = {"pool": "kind"}
    result = train(run, output=tmp_path / "run")
    assert result is not None
    line = result.metrics[-1]
    for kind in sets:
        assert line[f"eval/{kind}/environment/{kind}/share"] == 1.0
        assert line[f"eval/{kind}/environment/{kind}/reward"] == line[f"eval/{kind}/score"]
        assert 0 <= line[f"curriculum/success/{kind}"] <= 1
    assert line["environment/games/share"] + line["environment/more/share"] == pytest.approx(1.0)
