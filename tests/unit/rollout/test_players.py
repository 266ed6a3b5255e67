"""Players of sections: how they wrap each other, what they may yield, and what they keep."""

import logging
from dataclasses import replace

import pytest

from rlhf_core import Column, Columns
from rlhf_core.config.resolve import resolve
from rlhf_core.config.section import Section
from rlhf_core.errors import PluginError
from rlhf_core.rollout import Player
from rlhf_core.rollout.evaluate import at_temperature
from rlhf_core.rollout.journal import Journal
from rlhf_core.rollout.player import RunPlayer
from rlhf_testing.engine import FakeEngine
from rlhf_testing.runs import tiny_run
from rlhf_testing.samples import make_prompt

SAMPLES = [(make_prompt(position), position) for position in range(3)]


class Wrapper(Player):
    def __init__(self, context):
        self.context, self.default, self.state, self.closed = context, context.default, {}, 0

    def play(self, samples):
        yield from self.default.play(samples)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state

    def close(self):
        self.closed += 1


class Plays(Section):
    """A section whose player is given by the test."""

    def player(self, context):
        return type(self).make(context)


@pytest.fixture
def player(monkeypatch, tokenizer):
    """The player of a run with these sections, by name."""

    def make(folder=None, columns=None, greedy=False, **players):
        run = resolve(tiny_run())
        made = [type("Brought", (Plays,), {"make": staticmethod(each)})() for each in players.values()]
        sections = [(name, section, "acme 1.0") for name, section in zip(players, made, strict=True)]
        monkeypatch.setattr("rlhf_core.config.resolved.ResolvedRun.player_sections", sections)
        monkeypatch.setattr("rlhf_core.config.resolved.ResolvedRun.row_columns", [("acme 1.0", columns or {})])
        purpose, sampling = ("greedy", at_temperature(run.sampling, 0)) if greedy else ("train", run.sampling)
        return RunPlayer(run, FakeEngine(), tokenizer, sampling, seed=0, purpose=purpose, folder=folder)

    return make


def test_without_a_section_each_prompt_is_answered_once(player):
    played = list(player().play(SAMPLES))
    assert sorted(each.sample_id for each in played) == [0, 1, 2]
    assert all(len(each.rows) == 1 and each.reward is None and not each.rows[0].columns for each in played)


def test_sections_wrap_each_other_in_order_and_may_bring_none(player):
    found = player(first=Wrapper, none=lambda context: None, last=Wrapper)
    assert list(found.sections) == ["first", "last"]
    assert found.sections["last"].default is found.sections["first"]
    assert {each.context.purpose for each in found.sections.values()} == {"train"}
    assert player(first=Wrapper, greedy=True).sections["first"].context.sampling.greedy


def test_the_environment_is_the_innermost():
    run = resolve(tiny_run({"environment": {"name": "guess-number"}, "prompts": None, "rewards": None}))
    names = [name for name, _, _ in run.player_sections]
    assert names[0] == "environment" and names[1:] == sorted(names[1:]) and "guards" in names


def test_times_are_counted_once_however_often_a_player_is_wrapped(player):
    found = player(first=Wrapper, last=Wrapper)
    tokens = sum(len(row.ids) for each in found.play(SAMPLES) for row in each.rows)
    assert found.times.take().response_tokens == tokens > 0
    assert found.times.response_tokens == 0


def test_state_is_by_section_and_every_player_is_closed(player):
    found = player(first=Wrapper, last=Wrapper)
    assert found.state_dict() == {}
    found.sections["last"].state = {"seen": 3}
    assert found.state_dict() == {"last": {"seen": 3}}
    found.load_state_dict({"first": {"seen": 5}})
    assert found.sections["first"].state == {"seen": 5}
    found.close()
    assert [each.closed for each in found.sections.values()] == [1, 1]


class Twice(Wrapper):
    def play(self, samples):
        for each in self.default.play(samples):
            yield from (each, each)


class Left(Wrapper):
    def play(self, samples):
        yield from self.default.play(samples[1:])


class Adds(Wrapper):
    def play(self, samples):
        for each in self.default.play(samples):
            for row in each.rows:
                row.columns |= Columns({"novel": 1.0}, {"novel": Column("sample")})
            yield replace(each, rows=each.rows)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Twice, r"the player of the section bad \(acme 1.0\) answered sample \d, which is not or no longer requested"),
        (Left, "left 1 of 3 samples unanswered"),
        (Adds, "added a column 'novel', which no section declares"),
    ],
)
def test_what_a_player_must_not_yield_names_its_section(player, wrong, message):
    with pytest.raises(PluginError, match=message):
        list(player(bad=wrong).play(SAMPLES))


def test_declared_columns_are_on_the_rows(player):
    found = player(adds=Adds, columns={"novel": Column("sample")})
    assert [float(row.columns["novel"]) for each in found.play(SAMPLES) for row in each.rows] == [1.0] * 3


def test_a_row_may_replace_a_column_of_its_prompt(player):
    columns = Columns({"novel": 0.0}, {"novel": Column("prompt")})
    samples = [(replace(prompt, columns=columns), number) for prompt, number in SAMPLES]
    assert [float(row.columns["novel"]) for each in player(adds=Adds).play(samples) for row in each.rows] == [1.0] * 3


def test_a_section_that_raises_is_named_and_the_players_before_it_are_closed(player):
    opened = []

    def first(context):
        opened.append(Wrapper(context))
        return opened[-1]

    with pytest.raises(PluginError, match=r"player of the section last raised ZeroDivisionError.*"):
        player(first=first, last=lambda context: 1 // 0)
    assert opened[0].closed == 1


def test_a_journal_is_read_by_later_attempts(player, tmp_path):
    lines = [{"sample": 3, "text": "é"}, {"sample": 4}]
    for expected in ([], lines):
        found = player(folder=tmp_path, keeps=Wrapper)
        journal = found.sections["keeps"].context.journal
        assert list(journal.read()) == expected
        for line in lines if not expected else ():
            journal.append(line)
        found.close()
    (file,) = (tmp_path / "journal" / "keeps" / "train").iterdir()
    file.write_bytes(file.read_bytes()[:-3])  # a crash in the middle of a line
    assert list(Journal(file.parent).read()) == lines[:1]


def test_a_journal_is_bounded_by_deleting_closed_files(tmp_path):
    journal = Journal(tmp_path / "journal")
    paths = []
    for number in range(3):
        journal.append({"sample": number})
        paths.append(journal.path)
        journal.close()
    assert journal.folder == tmp_path / "journal" and len(set(paths)) == 3
    paths[0].unlink()
    assert [line["sample"] for line in Journal(journal.folder).read()] == [1, 2]


def test_a_journal_without_a_run_folder_says_that_it_keeps_nothing(caplog, tmp_path, player):
    found = player(folder=tmp_path / "elsewhere", keeps=Wrapper)
    journal = found.sections["keeps"].context.journal
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            journal.append({"sample": 1})
    assert [each.message for each in caplog.records if "stores nothing" in each.message] == [caplog.messages[0]]
    assert list(journal.read()) == []
    found.close()
    assert not (tmp_path / "elsewhere").exists()


def test_a_journal_refuses_what_json_has_not(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match="Out of range float values"):
        journal.append({"sample": float("nan")})
    journal.close()
    assert list(Journal(tmp_path).read()) == []
