"""Environments in a process of their own: the same episodes in every form; and what ends one that does harm."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lonely_environments
import pytest

from rlhf_core.config.problems import Problems
from rlhf_core.errors import EpisodeError, PluginError
from rlhf_core.types import SamplingParams
from rlhf_episodes import play as play_module
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.engine import FakeEngine
from rlhf_testing.episodes import episode_tokenizer
from rlhf_testing.episodes import plain as plain_values
from rlhf_testing.samples import make_prompt

FILE = Path(lonely_environments.__file__)
START = 30.0
"""A deadline that is never reached."""


def section(name, **options):
    problems = Problems()
    environment = resolve_environment(
        {"name": f"{FILE}:{name}" if name.isidentifier() and name[0].isupper() else name, **options}, problems
    )
    problems.raise_if_any("environment")
    return environment


def player_of(environment, *, engine=None, tokenizer=None, max_new_tokens=4):
    return build_environment_player(
        environment,
        engine or FakeEngine(),
        tokenizer or episode_tokenizer(chat=False),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        seed=5,
    )


def play(environment, *, samples=4, answer=None, plays=1, **options):
    prompt = replace(make_prompt(0), answer=answer, metadata={"name": ("a", "tuple")})
    with closing(player_of(environment, **options)) as player:
        for _ in range(plays):
            found = list(player.play([(prompt, number) for number in range(samples)]))
    return sorted(found, key=lambda each: each.sample_id)


def plain(played: Any) -> dict[str, Any]:
    found: dict[str, Any] = plain_values(asdict(played))
    return found


def both(name, *, samples=4, answer=None, engine=FakeEngine, plays=1, **options):
    """The episodes and what was asked of the engine, without and with isolation."""
    for isolate in (False, True):
        asked = engine()
        yield play(section(name, isolate=isolate, **options), samples=samples, answer=answer, engine=asked), asked.calls


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Counts", {}),
        ("Counts", {"turns": 20, "max_turns": 4}),
        ("Counts", {"turns": 20, "max_tokens": 12}),
        ("CountsAsync", {"concurrency": 2}),
        ("Forks", {"max_turns": 6}),
        ("Forks", {"max_turns": 30, "max_tokens": 20}),
        ("GivesUp", {}),
    ],
)
@pytest.mark.slow_except("Counts-options1", "CountsAsync-options3", "Forks-options5", "GivesUp-options6")
def test_episodes_are_those_without_it(name, options, monkeypatch):
    monkeypatch.setattr(play_module, "PATIENCE_SECONDS", START)  # on a busy machine, too, a round waits for all
    (here, asked), (there, asked_there) = both(name, **options)
    assert list(map(plain, there)) == list(map(plain, here))
    assert asked_there == asked, "the engine was asked for other turns, or for them in other rounds"
    assert all(each.rows for each in here)


def test_tools_are_called_there():
    call = '<tool_call>{"name": "add", "arguments": {"first": 1, "second": 2}}</tool_call>'
    tokenizer = episode_tokenizer(chat=True)

    def engine():
        ids = tokenizer.encode(call, add_special_tokens=False)
        return FakeEngine(answer=lambda request, version: [*(ids if request.offset == 0 else []), 2])

    (here, there) = (
        play(section("Sums", isolate=isolate), engine=engine(), tokenizer=tokenizer, max_new_tokens=100)
        for isolate in (False, True)
    )
    assert list(map(plain, there)) == list(map(plain, here))
    assert [each.reward for each in here] == [3.0] * 4


ERRORS = ["raise", "exit", "nan", "no triple", "no text"]


@pytest.mark.parametrize("fault", ERRORS)
def test_errors_are_those_without_it(fault, caplog):
    told = []
    for isolate in (False, True):
        caplog.clear()
        with pytest.raises(EpisodeError) as raised:
            play(section("Faulty", isolate=isolate, retries=1), answer=fault)
        told.append(
            (str(raised.value), raised.value.where, raised.value.hint, [each.message for each in caplog.records])
        )
        # Where an object is named, its address is not the same.
    assert [each[1:3] for each in told] == [told[0][1:3]] * 2
    if fault != "no text":
        assert told[0] == told[1]


@pytest.mark.parametrize("where", ["its constructor", "reset"])
def test_a_failure_before_the_first_turn(where):
    told = []
    for isolate in (False, True):
        with pytest.raises((EpisodeError, PluginError), match="raised OSError") as raised:
            play(section("Faulty", isolate=isolate, where=where), answer="raise")
        told.append((type(raised.value), str(raised.value)))
    assert told[0] == told[1]
    found = play(section("Faulty", isolate=True, where="reset", on_failure="zero"), answer="raise")
    assert [len(each.rows) for each in found] == [1, 0, 1, 1]


def test_text_that_is_none_is_its_environments_fault():
    found = play(section("Faulty", isolate=True, on_failure="zero"), answer="half a character")
    assert [each.rows[0].columns["environment"]["failed"] for each in found] == [0, 1, 0, 0]


HARM = {
    "os._exit": "step ended its process with exit code 7",
    "segfault": "step crashed: its process was ended by SIGSEGV",
    "lock": "step did not return within 1 s",
    "sleep": "step did not return within 1 s",
    "memory": "step took .* bytes of memory, more than its limit of 400,000,000",
    "print": "step printed more than 8,388,608 bytes within 10 s",
    "scribble": "step wrote a message of 4,294,967,295 bytes",
}


@pytest.mark.parametrize(
    ("name", "fault"), [*(("Faulty", fault) for fault in HARM), ("FaultyInLoop", "os._exit"), ("FaultyInLoop", "lock")]
)
@pytest.mark.slow
def test_one_that_does_harm_fails_alone(name, fault, caplog):
    """The others are made again: none is lost, and their rewards and tokens are what they would have been."""
    well = play(section("Faulty", isolate=False))
    options = {"timeout_seconds": 1.0 if "return" in HARM[fault] else START, "memory_limit_bytes": 400_000_000}
    with caplog.at_level(logging.WARNING):
        found = play(section(name, isolate=True, on_failure="zero", **options), answer=fault)
    assert [each.rows[0].columns["environment"]["failed"] for each in found] == [0, 1, 0, 0]
    for here, there in zip(well, found, strict=True):
        if here.sample_id != 1:
            assert (plain(here)["rows"], here.turn_rewards) == (plain(there)["rows"], there.turn_rewards)
    (told,) = [record for record in caplog.records if "attempt" in record.message]
    assert re.search(HARM[fault], told.message)
    assert "sample 1" in told.message


@pytest.mark.slow
def test_so_does_one_that_holds_the_lock_in_reset():
    options = {"timeout_seconds": 1.0, "on_failure": "drop", "where": "reset"}
    found = play(section("Faulty", isolate=True, **options), answer="lock")
    assert [len(each.rows) for each in found] == [1, 0, 1, 1]


@pytest.mark.slow
def test_so_does_a_tool_that_is_given_what_a_model_wrote(tmp_path, caplog):
    """Of a file, in the environment `tools`, whose own default it is to be in a process of its own."""
    file = tmp_path / "tools.py"
    file.write_text(
        'import re\ndef match(pattern: str) -> str:\n    """Match."""\n    '
        'return str(re.match(pattern, "a" * 100 + "b"))\n'
    )
    call = '<tool_call>{"name": "match", "arguments": {"pattern": "%s"}}</tool_call>'
    tokenizer = episode_tokenizer(chat=True)

    def answer(request, version):
        pattern = "(a|aa)+$" if request.sample_id == 1 else "(a)+b$"
        return [*(tokenizer.encode(call % pattern, add_special_tokens=False) if request.offset == 0 else []), 2]

    environment = section("tools", functions=[f"{file}:match"], timeout_seconds=1.0, on_failure="zero")
    with caplog.at_level(logging.WARNING):
        found = play(environment, engine=FakeEngine(answer=answer), tokenizer=tokenizer, max_new_tokens=100)
    assert [each.rows[0].columns["environment"]["failed"] for each in found] == [0, 1, 0, 0]
    assert "<re.Match object" in found[0].rows[0].turns[1].text
    assert "sample 1: tool match did not return within 1 s" in caplog.text


@pytest.mark.parametrize("fault", ["os._exit", "lock"])
@pytest.mark.slow_except("os._exit")
def test_it_ends_the_run_where_the_policy_says_so(fault):
    with pytest.raises(EpisodeError, match=HARM[fault]) as raised:
        play(section("Faulty", isolate=True, timeout_seconds=1.0), answer=fault)
    assert raised.value.where == "environment Faulty, sample 1"


@pytest.mark.slow
def test_a_retry_may_go_well(tmp_path):
    options = {"retries": 1, "flag": str(tmp_path / "once")}
    found = play(section("Faulty", isolate=True, **options), answer="os._exit")
    assert [each.reward for each in found] == [1.0] * 4


@pytest.mark.slow
def test_where_several_run_each_is_played_alone(caplog):
    """Sample 0 holds the lock while others sleep: nobody can tell whose fault it is, and only one of them fails."""
    found = play(section("Wanders", isolate=True, on_failure="zero", timeout_seconds=1.0), samples=3)
    assert [each.rows[0].columns["environment"]["failed"] for each in found] == [1, 0, 0]
    assert [each.reward for each in found] == [0.0, 1.0, 1.0]
    assert "environment Wanders: its process is blocked. 3 episodes whose code was running are played" in caplog.text


@pytest.mark.slow
def test_in_a_storm_nothing_is_lost_or_doubled():
    """Some fifteen of a hundred episodes end their process, hang or raise; all others are as they are without harm."""
    options = {"on_failure": "drop", "concurrency": 16, "timeout_seconds": 2.0}
    calm = play(section("Storm", isolate=False, calm=True, **options), samples=100)
    found = play(section("Storm", isolate=True, **options), samples=100)
    assert [each.sample_id for each in found] == list(range(100))
    assert [(plain(each)["rows"], each.reward) for each in found] == [
        (plain(each)["rows"], each.reward) for each in calm
    ]
    assert 5 < sum(not each.rows for each in found) < 50


def test_one_process_is_kept_from_play_to_play_and_ends_with_the_player():
    prompt = make_prompt(0)
    player = player_of(section("SaysWho", isolate=True))
    with closing(player):
        found = [each.reward for _ in range(2) for each in player.play([(prompt, 0), (prompt, 1)])]
        (pid,) = {int(each) for each in found}
        assert pid != os.getpid()
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_slow_start_is_no_slow_call(tmp_path, monkeypatch):
    """Rounds stay those of environments that do not wait, whatever its module takes to be imported."""
    file = tmp_path / "slow.py"
    file.write_text(FILE.read_text())
    environment = section(f"{file}:Counts", isolate=True)
    file.write_text(f"{FILE.read_text()}\ntime.sleep(0.5)\n")
    seen = []

    def wait(session, seconds):
        settled = true_wait(session, seconds)
        seen.append((settled, session.is_starting))
        return settled

    true_wait = play_module._Session.wait_for_all
    monkeypatch.setattr(play_module._Session, "wait_for_all", wait)
    monkeypatch.setattr(play_module, "PATIENCE_SECONDS", 0.05)
    with closing(player_of(environment)) as player:
        assert len(list(player.play([(make_prompt(0), number) for number in range(4)]))) == 4
        assert (False, True) in seen
        assert player.is_slow == ((False, False) in seen)


def test_it_loads_no_heavy_library():
    assert [each.reward for each in play(section("Imports", isolate=True))] == [0.0] * 4


@pytest.mark.slow
def test_code_that_cannot_be_imported_ends_the_run_whatever_the_policy(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text('def tool(text: str) -> str:\n    """Say it."""\n    return text\n')
    environment = section("tools", functions=[f"{file}:tool"], on_failure="drop")
    assert environment.config.isolate
    file.write_text("import no_such_module\n")
    with pytest.raises(PluginError, match="fails to run: ModuleNotFoundError: No module named 'no_such_module'"):
        play(environment)
    file.write_text("import os\nos._exit(5)\n")
    with pytest.raises(EpisodeError, match="its constructor ended its process with exit code 5"):
        play(environment_of(environment, on_failure="fail"))


@pytest.mark.parametrize(
    ("code", "where", "told"),
    [
        ("raise OSError('no')", 'environment "{file}:Counts"', "fails to run: OSError: no"),
        (
            "import os; os._exit(5)",
            "environment Counts",
            "when a child process imported it, it ended its process with exit code 5",
        ),
        ("kept = bytearray(b'x') * 500_000_000; time.sleep(600)", "environment Counts", "it took .* bytes of memory"),
        ("while True: print('x' * 1_000_000)", "environment Counts", "it printed more than 8,388,608 bytes"),
    ],
    ids=["raises", "exits", "memory", "output"],
)
@pytest.mark.slow
def test_a_module_that_does_harm_when_it_is_imported_ends_the_run_by_name(tmp_path, code, where, told):
    file = tmp_path / "game.py"
    file.write_text(FILE.read_text())
    environment = section(f"{file}:Counts", isolate=True, on_failure="drop", memory_limit_bytes=300_000_000)
    file.write_text(f"{FILE.read_text()}\n{code}\n")
    with pytest.raises(PluginError, match=told) as raised:
        play(environment)
    assert raised.value.where == where.format(file=file)


_PARENT = """
import time
from rlhf_containment.processes.child import ChildProcess
child = ChildProcess("rlhf_episodes.isolation.worker")
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_run_that_started_it():
    """Killed at once, whatever its process does: here it waits for a first message."""
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _lives(pid)
        parent.kill()
    deadline = time.monotonic() + START
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _lives(pid)


def _lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def environment_of(environment, **options):
    return replace(environment, config=environment.config.model_copy(update=options))
