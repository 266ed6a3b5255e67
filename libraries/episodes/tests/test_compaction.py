"""An environment that shortens its conversation continues at the limit of its context, in a new branch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from playing import play_one

from rlhf_core.config.problems import Problems
from rlhf_core.errors import EpisodeError
from rlhf_core.rollout.journal import Journal
from rlhf_core.rollout.row import Played
from rlhf_core.types import SamplingParams
from rlhf_episodes.journal.turn_journal import TurnJournal
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.engine import FakeEngine
from rlhf_testing.episodes import ScriptedEngine, episode_tokenizer, plain
from rlhf_testing.samples import make_prompt


class Talks:
    """Eight turns. Shortens a conversation to its first message and a count."""

    turns = 8
    seen: list[Any]

    def reset(self, task: Any) -> Any:
        self.seen, self.played = [], 0
        return [{"role": "user", "content": "Go."}]

    def step(self, reply: Any) -> tuple[Any, float, bool]:
        self.played += 1
        return f"And {self.played}?", 1.0, self.played == self.turns

    def compact(self, messages: Any) -> Any:
        self.seen.append(messages)
        self.metrics = {"compacted": float(len(self.seen))}
        return [messages[0], {"role": "user", "content": f"({len(messages)} so far) {messages[-1]['content']}"}]


class Text(Talks):
    def reset(self, task: Any) -> Any:
        super().reset(task)
        return "Go:"

    def compact(self, messages: Any) -> Any:
        assert isinstance(messages, str)
        return f"Go:[{len(messages)}]"


def chat(make: Any, **options: Any) -> Played:
    tokenizer = episode_tokenizer(chat=True)
    engine = ScriptedEngine(tokenizer, ["One.", "Two."], seed=1)
    options = {"max_turns": 10, "max_new_tokens": 12, **options}
    return play_one(make, tokenizer=tokenizer, engine=engine, prompt=make_prompt(0, text=""), **options)


def test_a_conversation_continues_in_new_branches() -> None:
    games: list[Any] = []
    played = chat(lambda: games.append(Talks()) or games[-1], max_tokens=90)
    (game,) = games
    assert game.played == 8 and played.reward == 8.0
    assert len(played.rows) == 1 + len(game.seen) > 2
    assert played.rows[0].columns["environment"]["own/compacted"] == len(game.seen)
    assert sorted(turn for row in played.rows for turn in row.own_turns) == list(range(8))
    for row, seen in zip(played.rows, game.seen, strict=False):
        assert len(row.ids) + len(f"user: {seen[-1]['content']}") + 12 > 90 - 12 and len(row.ids) <= 90
        roles = [message["role"] for message in seen]
        opening = ["user"] if row is played.rows[0] else ["user", "user"]
        assert roles == [*opening, *["assistant", "user"] * ((len(roles) - 1) // 2)]
        assert row.turns[-1].role == "policy", "the branch ends with the reply before the conversation was shortened"
    for row, seen in zip(played.rows[1:], game.seen, strict=True):
        assert row.text.startswith("user: Go.") and f"({len(seen)} so far) {seen[-1]['content']}" in row.text
        assert row.num_shared_turns == 0 and all(row.mask[: len(row.turns[0].token_ids)])


def test_without_compact_the_episode_ends_at_the_limit() -> None:
    class Silent(Talks):
        compact = None  # type: ignore[assignment]

    played = chat(Silent, max_tokens=90)
    assert len(played.rows) == 1 and played.rows[0].columns["environment"]["truncated"] == 1.0


def test_the_models_context_is_a_limit_too() -> None:
    played = chat(Talks, context_tokens=120)
    assert len(played.rows) > 1 and played.reward == 8.0
    assert all(len(row.sequence) <= 120 for row in played.rows)


def test_plain_text() -> None:
    played = play_one(Text, engine=FakeEngine(), max_turns=10, max_tokens=40, max_new_tokens=8)
    assert len(played.rows) > 1 and played.reward == 8.0
    assert all(row.text.startswith("Go:[") for row in played.rows[1:])


def test_a_conversation_that_is_still_too_long_ends_the_episode() -> None:
    class Grows(Talks):
        def compact(self, messages: Any) -> Any:
            return [*messages, *messages]

    played = chat(Grows, context_tokens=120)
    assert played.rows[-1].columns["environment"]["truncated"] == 1.0
    assert len(played.rows) == 1


@pytest.mark.parametrize("value", [None, "text", [], [{"content": "no role"}], 3])
def test_a_wrong_result_is_an_error_of_the_environment(value: Any) -> None:
    class Wrong(Talks):
        def compact(self, messages: Any) -> Any:
            return value

    with pytest.raises(EpisodeError, match="compact r(aised TypeError: compact )?returned"):
        chat(Wrong, max_tokens=90)


FILE = """
class Shop:
    def __init__(self):
        self.calls = 0

    def reset(self, prompt):
        pass

    def look(self, shelf: int) -> str:
        \"\"\"Look at a shelf.

        Args:
            shelf: Its number.
        \"\"\"
        self.calls += 1
        return f"shelf {shelf} is empty"

    def get_reward(self):
        return float(self.calls)

    def compact(self, messages):
        return [messages[0], {"role": "user", "content": f"You looked {self.calls} times. Go on."}]
"""


def shop(folder: Path, isolate: bool, journal: Path | None = None) -> tuple[Any, Any]:
    (folder / "shop.py").write_text(FILE)
    section = {"name": f"{folder}/shop.py:Shop", "max_turns": 6, "max_tokens": 250, "isolate": isolate}
    problems = Problems()
    environment = resolve_environment(section, problems)
    problems.raise_if_any("environment")
    assert environment is not None
    tokenizer = episode_tokenizer(chat=True)
    call = '<tool_call>{"name": "look", "arguments": {"shelf": 4}}</tool_call>'
    engine = ScriptedEngine(tokenizer, [call], seed=1)
    found = build_environment_player(environment, engine, tokenizer, sampling=SamplingParams(max_new_tokens=80), seed=3)
    lines = None
    if journal is not None:
        lines = Journal(journal)
        found.journal = TurnJournal(lines, engine, "run", 1)
    prompt = replace(make_prompt(0), messages=({"role": "user", "content": "Find it."},))
    with closing(found):
        played = sorted(found.play([(prompt, number) for number in range(4)]), key=lambda each: each.sample_id)
    if lines is not None:
        lines.close()
    return [plain(asdict(each)) for each in played], engine


def test_tools_in_a_process_of_their_own(tmp_path: Path) -> None:
    here, there = (shop(tmp_path, isolate)[0] for isolate in (False, True))
    assert here == there
    assert max(len(each["rows"]) for each in here) > 1


def test_recorded_turns_of_shortened_conversations(tmp_path: Path) -> None:
    first, sampled = shop(tmp_path, False, tmp_path / "journal")
    for path in (tmp_path / "journal").iterdir():
        lines = [line for line in path.read_text().splitlines() if '"episode"' not in line]
        path.write_text("\n".join(lines) + "\n")
    second, again = shop(tmp_path, False, tmp_path / "journal")
    assert [each["rows"][-1]["turns"] for each in first] == [each["rows"][-1]["turns"] for each in second]
    assert sum(map(len, sampled.calls)) and not sum(map(len, again.calls))
