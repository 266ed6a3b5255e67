"""Half-finished episodes survive: at whatever point a run ends, the next attempt samples no finished turn again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupted import Counts, Engine, Forks, Keeps, Killed, attempt, journal, made, same
from playing import player

from rlhf_core.config.problems import Problems
from rlhf_core.types import Completion, SamplingParams
from rlhf_episodes.play import EnvironmentPlayer
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.episodes import episode_tokenizer, plain
from rlhf_testing.samples import make_prompt

UNDISTURBED = {kind: same(attempt(made(kind)[0], None, Engine())) for kind in (Counts, Keeps, Forks)}


@pytest.mark.parametrize("kind", [Counts, Keeps, Forks])
@pytest.mark.parametrize("limits", [[0], [1], [2], [4], [5, 0, 2], [1, 1, 1, 1, 1], [7, 1]])
def test_no_finished_turn_is_sampled_again(kind: type, limits: list[int], tmp_path: Path) -> None:
    make, _ = made(kind)
    sampled = []
    for limit in limits:
        engine = Engine(limit)
        assert attempt(make, tmp_path, engine) is None
        sampled += engine.sampled
    engine = Engine()
    assert same(attempt(make, tmp_path, engine)) == UNDISTURBED[kind]
    sampled += engine.sampled
    whole = Engine()
    attempt(make, None, whole)
    assert sorted(sampled) == sorted(whole.sampled)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from([Counts, Keeps, Forks]), limit=st.integers(0, 12), cut=st.integers(0, 4000))
def test_a_file_may_end_anywhere(kind: type, limit: int, cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("journal")
    make, _ = made(kind)
    attempt(make, folder, Engine(limit))
    for path in folder.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[: -cut or None])
    assert same(attempt(make, folder, Engine())) == UNDISTURBED[kind]


def test_a_state_is_restored_instead_of_earlier_steps(tmp_path: Path) -> None:
    make, calls = made(Keeps)
    attempt(make, tmp_path, Engine(8))
    before = calls.count("step")
    assert calls.count("reset") == 3 and 6 <= before <= 8  # the last two turns may end the run before their steps
    calls.clear()
    attempt(make, tmp_path, Engine())
    assert (calls.count("reset"), calls.count("restore")) == (0, 3)
    assert 12 - before <= calls.count("step") <= 6


def test_without_a_state_recorded_turns_are_played_again(tmp_path: Path) -> None:
    make, calls = made(Counts)
    attempt(make, tmp_path, Engine(8))
    calls.clear()
    engine = Engine()
    attempt(make, tmp_path, engine)
    assert (calls.count("reset"), calls.count("step"), len(engine.sampled)) == (3, 12, 4)


@pytest.mark.parametrize("kind", [Counts, Keeps, Forks])
def test_finished_episodes_are_not_played_again(kind: type, tmp_path: Path) -> None:
    make, calls = made(kind)
    first = same(attempt(make, tmp_path, Engine()))
    calls.clear()
    engine = Engine()
    assert same(attempt(make, tmp_path, engine)) == first
    assert not calls and not engine.sampled


def test_turns_of_other_weights_are_not_used(tmp_path: Path) -> None:
    make, _ = made(Keeps)
    attempt(make, tmp_path, Engine(8))
    engine = Engine()
    engine.policy_version = 1
    found = attempt(make, tmp_path, engine)
    assert len(engine.sampled) == 12
    assert {row["sampled"][0][1]["policy_version"] for each in found for row in each["rows"]} == {1}


def test_turns_of_another_run_file_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, _ = made(Keeps)
    attempt(make, tmp_path, Engine(8))
    engine = Engine()
    with caplog.at_level(logging.INFO):
        found = journal(tmp_path, engine, run="other")[1]
        found.begin()
    found.open(make_prompt(0), 0)
    assert found.progress(0).steps == () and "recorded with other options" in caplog.text


@pytest.mark.parametrize("kind", [Counts, Keeps, Forks])
@pytest.mark.parametrize("limit", [7, None])
@pytest.mark.parametrize("metadata", [{"record": "another"}, {"image": object()}], ids=["record", "object"])
def test_a_sample_of_another_prompt_is_played_anew(
    kind: type, limit: int | None, metadata: dict[str, Any], tmp_path: Path
) -> None:
    make, calls = made(kind)
    attempt(make, tmp_path, Engine(limit))
    calls.clear()
    engine = Engine()
    found = player(make, engine=engine, max_new_tokens=3)
    lines, found.journal = journal(tmp_path, engine)
    prompt = replace(make_prompt(0), metadata=metadata)
    assert len(played(found, samples=3, prompt=prompt)) == 3
    lines.close()
    assert len(engine.sampled) == (9 if kind is Forks else 12) and "restore" not in calls
    if "image" in metadata:  # values that cannot be compared are never taken for the same
        engine = Engine()
        found = player(make, engine=engine, max_new_tokens=3)
        lines, found.journal = journal(tmp_path, engine)
        played(found, samples=3, prompt=prompt)
        lines.close()
        assert len(engine.sampled) == (9 if kind is Forks else 12)


@pytest.mark.parametrize("kind", [Keeps, Forks])
@pytest.mark.parametrize("same_weights", [True, False])
def test_later_versions_are_used_if_their_weights_are_the_same(
    kind: type, same_weights: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, _ = made(kind)
    for seed in (0, 0 if same_weights else 2):
        engine = Engine()
        found = player(make, engine=engine, max_new_tokens=3)
        lines, found.journal = journal(tmp_path, engine, num_kept=5)
        with caplog.at_level(logging.INFO):
            for version in range(3):
                engine.policy_version = version
                engine._seed = seed if version else 0  # a resume restores the weights of the first version
                list(found.play([(make_prompt(version), 5 * version + number) for number in range(2)]))
        lines.close()
    turns = 3 if kind is Forks else 4
    assert len(engine.sampled) == (2 if same_weights else 1 + 4 * turns), "one turn tests each later version"
    assert ("from version 1 on are not used: the weights differ" in caplog.text) == (not same_weights)


def test_after_a_rollback_nothing_recorded_before_is_used(tmp_path: Path) -> None:
    make, _ = made(Counts)
    engine = Engine()
    found = player(make, engine=engine, max_new_tokens=3)
    lines, found.journal = journal(tmp_path, engine)
    prompt = make_prompt(0)
    before = found.state_dict()
    assert before == {"journal": {"rollbacks": 0}}
    list(found.play([(prompt, 0)]))
    found.load_state_dict(before)  # the run was rolled back
    assert found.state_dict() == {"journal": {"rollbacks": 1}}
    lines.close()

    def sampled_by_an_attempt(state: dict[str, Any]) -> int:
        again = Engine()
        resumed = player(make, engine=again, max_new_tokens=3)
        lines, resumed.journal = journal(tmp_path / "copy", again)
        resumed.load_state_dict(state)
        list(resumed.play([(prompt, 0)]))
        lines.close()
        return len(again.sampled)

    (tmp_path / "copy").mkdir()
    for path in tmp_path.glob("*.jsonl"):
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    assert sampled_by_an_attempt({"journal": {"rollbacks": 0}}) == 0
    assert sampled_by_an_attempt({"journal": {"rollbacks": 1}}) == 4
    assert sampled_by_an_attempt({"journal": {"rollbacks": 0}}) == 1, "the run was rolled back later, so one is tested"


def test_old_files_are_deleted(tmp_path: Path) -> None:
    make, _ = made(Keeps)
    engine = Engine()
    found = player(make, engine=engine, max_new_tokens=3)
    lines, found.journal = journal(tmp_path, engine, num_kept=2)
    for version in range(6):
        engine.policy_version = version
        list(found.play([(make_prompt(version), version)]))
        list(found.play([(make_prompt(version), 10 + version)]))  # the same file
        versions = []
        for path in sorted(tmp_path.glob("*.jsonl")):
            records = [json.loads(line) for line in path.read_text().splitlines()]
            (one,) = {record["at"][1] for record in records[1:]}
            versions.append(one)
        assert versions == list(range(max(0, version - 2), version + 1))
    lines.close()
    again = Engine()
    again.policy_version = 9
    later = player(make, engine=again, max_new_tokens=3)
    lines, later.journal = journal(tmp_path, again, num_kept=2)
    list(later.play([(make_prompt(9), 9)]))
    lines.close()
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


class Changes(Keeps):
    """Has other observations in the second attempt."""

    changed = False

    def reset(self, task: Any) -> str:
        return super().reset(task) + ("!" if self.changed else "")


def test_an_environment_that_changed_starts_again(tmp_path: Path) -> None:
    make, calls = made(Changes)
    attempt(make, tmp_path, Engine(8), samples=3)
    for path in tmp_path.glob("*.jsonl"):  # the recorded replies are those to other observations
        text = path.read_text()
        assert '"observation": "0:"' in text
        path.write_text(text.replace('"observation": "0:"', '"observation": "0!:"'))
    calls.clear()
    engine = Engine()
    assert same(attempt(make, tmp_path, engine)) == UNDISTURBED[Keeps]
    assert calls.count("reset") == 1 and calls.count("restore") == 3


class CannotRestore(Keeps):
    def restore(self, task: Any, state: Any) -> None:
        raise OSError("the game is gone")


def test_an_episode_that_cannot_be_restored_starts_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, _ = made(CannotRestore)
    attempt(make, tmp_path, Engine(8))
    engine = Engine()
    assert same(attempt(make, tmp_path, engine, on_failure="fail", retries=0)) == UNDISTURBED[Keeps]
    assert len(engine.sampled) == 4, "recorded turns are used even if the state is not"
    assert "restore raised OSError: the game is gone" in caplog.text and "now starts again" in caplog.text


class WrongState(Counts):
    def state(self) -> Any:
        return {1, 2}

    def restore(self, task: Any, state: Any) -> None: ...


class LongState(WrongState):
    def state(self) -> Any:
        return "x" * 100_000


@pytest.mark.parametrize(("kind", "problem"), [(WrongState, "not JSON values"), (LongState, "more than 100000")])
def test_a_state_that_cannot_be_recorded(
    kind: type, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`state` and `restore` may have another meaning in an environment that exists."""
    make, calls = made(kind)
    assert attempt(make, tmp_path, Engine(8)) is None
    assert caplog.text.count(problem) <= 1
    engine = Engine()
    assert same(attempt(make, tmp_path, engine)) == UNDISTURBED[Counts]
    assert len(engine.sampled) == 4 and "restore" not in calls


# Isolated and built-in environments


FILE = """
class Adds:
    def __init__(self):
        self.total = 0

    def reset(self, task):
        self.total = task.sample_id
        return f"{self.total}:"

    def step(self, reply):
        self.total += len(reply.text)
        return f"{self.total},", float(self.total), self.total > 9

    def state(self):
        return self.total

    def restore(self, task, state):
        self.total = state
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_a_process_of_its_own(isolate: bool, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(FILE)
    section = {"name": f"{tmp_path}/game.py:Adds", "max_turns": 4, "isolate": isolate}
    open_player = partial(built, section)
    whole = Engine()
    undisturbed = played(open_player(whole), samples=3)
    limit = len(whole.sampled) // 2
    engines = [Engine(limit), Engine()]
    for engine in engines:
        found = open_player(engine)
        lines, found.journal = journal(tmp_path / "journal", engine)
        with suppress(Killed):
            assert same(played(found, samples=3)) == same(undisturbed)
        lines.close()
    assert sorted(engines[0].sampled + engines[1].sampled) == sorted(whole.sampled)
    steps = [line for path in (tmp_path / "journal").iterdir() for line in path.read_text().splitlines()]
    assert sum('"step"' in line for line in steps) >= 3 + len(whole.sampled) - limit


def built(section: dict[str, Any], engine: Any) -> EnvironmentPlayer:
    problems = Problems()
    environment = resolve_environment(section, problems)
    problems.raise_if_any("environment")
    assert environment is not None
    tokenizer = episode_tokenizer(chat=section["name"] == "conversation")
    return build_environment_player(environment, engine, tokenizer, sampling=SamplingParams(max_new_tokens=4), seed=3)


def played(found: EnvironmentPlayer, *, samples: int, prompt: Any = None) -> Any:
    with closing(found):
        episodes = list(found.play([(prompt or make_prompt(0), number) for number in range(samples)]))
    return [plain(asdict(each)) for each in sorted(episodes, key=lambda each: each.sample_id)]


@pytest.mark.parametrize("support", [0, 3])
def test_a_completion_survives_json(support: int, tmp_path: Path) -> None:
    class Hot(Engine):
        def generate(self, requests: Any, sampling: Any) -> Iterator[Completion]:
            for each in super().generate(requests, sampling):
                heat = [0.1 * (number + 1) for number in range(len(each.token_ids))]
                yield replace(each, columns={"temperature": heat}, logprobs=tuple(-0.1 / 3 for _ in heat))

    found = []
    for _ in range(2):
        make, _ = made(Forks)
        engine = Hot()
        opened = player(make, engine=engine, max_new_tokens=3)
        lines, opened.journal = journal(tmp_path, engine)
        rules = opened.environments[0].rules
        object.__setattr__(rules, "sampling", replace(rules.sampling, top_k=support))
        found.append(same(played(opened, samples=2)))
        lines.close()
    assert found[0] == found[1] and not engine.sampled
    (row, *_) = found[1][0]["rows"]
    (_, completion) = row["sampled"][0]
    assert completion["columns"]["temperature"] == pytest.approx(
        [0.1 * (k + 1) for k in range(len(completion["token_ids"]))]
    )
    assert (completion["support_ids"] is None) == (support == 0)
