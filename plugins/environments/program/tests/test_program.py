"""Programs as agents: folders, variables, scores, and each way in which an episode fails."""

import json
import sys

import pytest
from interrupted import Killed
from played import AGENT, CHAT, WRITES, Interrupted, Recorded, metrics, play

from rlhf_containment.sandbox import missing
from rlhf_core.errors import ConfigError, DataError, EpisodeError

pytestmark = [
    pytest.mark.skipif(missing("namespaces") is not None, reason=f"needs namespaces: {missing('namespaces')}"),
]
HAS_GREETING = ["grep", "-qx", "hello", "greeting"]
CALL = f"{sys.executable} {AGENT} task"
"""A shell command that has one turn of the policy."""
RAISES = """
from agent import ask
while True:
    ask([{"role": "user", "content": "hello"}])
"""


def test_the_shell_agent_changes_its_folder_and_is_scored():
    (played,) = play((WRITES, "Done."), score=HAS_GREETING)
    assert (played.reward, metrics(played)["num_turns"], metrics(played)["own/program_failed"]) == (1.0, 2.0, 0.0)
    assert [turn.role for turn in played.rows[0].turns] == ["policy", "environment", "policy"]
    assert "exit code 0" in played.rows[0].turns[1].text
    (played,) = play(("Done.",), score=HAS_GREETING)
    assert (played.reward, metrics(played)["own/score_stopped"]) == (0.0, 0.0)


def test_a_folder_is_made_from_the_record_and_checked_with_files_the_program_does_not_see():
    record = {
        **CHAT,
        "answer": "4",
        "files": {"src/sum.py": "total = 2 + 2\n", "go.sh": "#!/bin/sh\ncp src/sum.py found; ls > seen\n"},
        "score_files": {"hidden/check.sh": "#!/bin/sh\ngrep -q hidden seen && exit 1\ngrep -q $1 hidden/key found"},
    }
    record["score_files"]["hidden/key"] = "4"
    record["files"]["go.sh"] += "echo 4 >> found\n"
    score = ["sh", "hidden/check.sh", "{answer}"]
    (played,) = play(record=record, command=["sh", "-c", f"./go.sh; {CALL}"], score=score)
    assert played.reward == 1.0


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["a"], "is list"),
        ({"a": 1}, "not a path and a text"),
        ({"../a": ""}, "must be relative"),
        ({"/a": ""}, "must be relative"),
        ({"a": "", "a/b": ""}, "both as a file and as a folder"),
        ({"a": "x" * 2**21}, "more than environment.max_folder_bytes"),
    ],
)
def test_a_record_with_bad_files_is_refused_by_name(files, problem):
    with pytest.raises((DataError, EpisodeError), match=f"'files' of the record .*{problem}"):
        play(record={**CHAT, "files": files}, score=["true"], max_folder_bytes=2**20)


def test_files_of_the_score_replace_what_the_program_put_in_their_way():
    record = {**CHAT, "score_files": {"check/key": "4", "given": "5"}}
    command = ["sh", "-c", f"echo 1 > check; mkdir given; echo 1 > given/a; {CALL}"]
    score = ["sh", "-c", "grep -q 4 check/key && grep -q 5 given"]
    assert play(record=record, command=command, score=score)[0].reward == 1.0


def test_a_full_folder_is_scored_with_files_of_the_score():
    record = {**CHAT, "score_files": {"key": "4" * 2**19}}
    command = ["sh", "-c", f"truncate -s 900K sparse; {CALL}"]
    (played,) = play(record=record, command=command, score=["test", "-s", "sparse"], max_folder_bytes=2**20)
    assert played.reward == 1.0


def test_variables_and_placeholders(tmp_path):
    command = ["sh", "-c", f"env > env; printf '%s' \"$1\" > given; {CALL}", "sh", "{model} {prompt} {unknown}"]
    (tmp_path / "seen.py").write_text(
        "import json, pathlib\n"
        "def seen(rollouts, *, kept: str = '-'):\n"
        "    (found,) = rollouts\n"
        "    files = {each.name: each.read_text() for each in pathlib.Path(found.metadata['folder']).iterdir()}\n"
        "    pathlib.Path(kept).write_text(json.dumps(files))\n"
        "    return [1.5]\n"
    )
    score = {"name": "./seen.py:seen", "kept": str(tmp_path / "kept"), "weight": 2}
    variables = {"MINE": "<{base_url}>"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        (played,) = play(command=command, variables=variables, score=score, folder=tmp_path)
    assert played.reward == 3.0
    seen = json.loads((tmp_path / "kept").read_text())
    found = dict(line.split("=", 1) for line in seen["env"].splitlines())
    assert found["MINE"] == f"<{found['OPENAI_BASE_URL']}>"
    assert seen["given"] == "policy Write hello to the file greeting. {unknown}"
    assert found["ANTHROPIC_BASE_URL"] + "/v1" == found["OPENAI_BASE_URL"]
    assert found["ANTHROPIC_API_KEY"] == found["OPENAI_API_KEY"]
    assert not {name for name in found if name.startswith(("PYTEST", "RLHF"))}


def test_a_printed_score():
    assert play(score=["sh", "-c", "echo noise; echo 0.25; echo"], score_is_printed=True)[0].reward == 0.25
    for said in ("echo much", "echo 1; exit 3", "echo nan"):
        with pytest.raises(EpisodeError, match="did not print a number last"):
            play(score=["sh", "-c", said], score_is_printed=True)


@pytest.mark.parametrize("check", ["sleep 60", "sleep 60 & true", "yes"])
@pytest.mark.slow_except("yes")
def test_a_score_that_exceeds_a_limit_is_zero(check):
    (played,) = play(score=["sh", "-c", check], score_seconds=2.0)
    assert (played.reward, metrics(played)["own/score_stopped"]) == (0.0, 1.0)


def test_a_score_that_cannot_run_is_a_failure():
    with pytest.raises(EpisodeError, match="the command of score did not run: the sandbox cannot start 'nope'"):
        play(score=["nope"])


FAILURES = {
    "output": ("yes", {"max_output_bytes": 1000}, "sh wrote more than 1000 bytes of output"),
    "child": ("sleep 60 & true", {}, "sh ended but left processes running: sleep"),
    "memory": (
        f"{sys.executable} -c 'a = bytearray(2**28); input(); import time; time.sleep(60)'; sleep 60",
        {"program_memory_bytes": 2**27},
        "used more than 134217728 bytes of memory",
    ),
    "processor": ("while :; do :; done", {"program_cpu_seconds": 1}, "used more than 1 s of processor time"),
    "folder": ("truncate -s 2M big", {"max_folder_bytes": 2**20, "max_files": 100}, "wrote|left has more than"),
    "exit code": ("echo no licence >&2; exit 3", {}, "exit code 3 before it called the endpoint: no licence"),
    "deadline": ("sleep 60", {"timeout_seconds": 2.0}, "run did not return within 2 s"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.slow
def test_a_program_that_fails_ends_its_episode_by_name(name):
    script, options, problem = FAILURES[name]
    options = {"command": ["sh", "-c", script], "score": ["true"], **options}
    if name == "folder":
        options["command"][2] = f"{CALL}; ln big a 2>/dev/null; for i in 1 2 3; do truncate -s 900K $i; done"
    with pytest.raises(EpisodeError, match=problem):
        play(**options)
    (played,) = play(**options, on_failure="drop")
    assert played.rows == ()


def test_a_dead_endpoint_ends_the_episode_by_name(monkeypatch):
    from rlhf_episodes.endpoint import Endpoints

    close = Endpoints.open

    async def closed(self, episode):
        endpoint = await close(self, episode)
        self._server.close()
        return endpoint

    monkeypatch.setattr(Endpoints, "open", closed)
    with pytest.raises(EpisodeError, match="the endpoint of the episode does not answer"):
        play(score=["true"])


def test_after_a_failure_a_zero_keeps_the_turns():
    (played,) = play(command=["sh", "-c", f"{CALL}; yes"], score=["true"], on_failure="zero")
    assert (played.reward, metrics(played)["failed"]) == (0.0, 1.0)


def test_a_killed_run_samples_no_finished_turn_again(tmp_path):
    first, again = Interrupted(limit=1), Interrupted()
    with pytest.raises(Killed):
        play(engine=first, recorded=tmp_path, score=HAS_GREETING)
    (played,) = play(engine=again, recorded=tmp_path, score=HAS_GREETING)
    assert (played.reward, metrics(played)["num_turns"]) == (1.0, 2.0)
    assert [offset > 0 for _, _, offset, _ in first.sampled] == [False]
    assert [offset > 0 for _, _, offset, _ in again.sampled] == [True]


def test_the_limit_of_turns_truncates_and_the_folder_still_counts():
    (played,) = play((WRITES,), score=HAS_GREETING, max_turns=1)
    assert (metrics(played)["truncated"], played.reward) == (0.0, 1.0), "the agent ends normally at the limit"
    record = {**CHAT, "files": {"go.py": RAISES}}
    command = ["sh", "-c", f"cp {AGENT} agent.py; python go.py"]
    (played,) = play(record=record, command=command, read=[str(AGENT)], score=["true"], max_turns=1)
    assert (metrics(played)["truncated"], metrics(played)["own/program_failed"], played.reward) == (1.0, 1.0, 1.0)


def test_the_network_is_one_port():
    code = (
        "import os, socket, urllib.parse as p\n"
        "port = p.urlsplit(os.environ['OPENAI_BASE_URL']).port\n"
        "socket.create_connection(('127.0.0.1', port), 5).close()\n"
        "for place in (('127.0.0.1', port + 1), ('10.0.0.1', 80), ('8.8.8.8', 53)):\n"
        "    try: socket.create_connection(place, 2)\n"
        "    except OSError as error: print(error.errno, file=open('found', 'a'))\n"
        "for kind in ((socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM), (16, 3)):\n"
        "    try: socket.socket(*kind)\n"
        "    except OSError as error: print(error.errno, file=open('found', 'a'))\n"
    )
    record = {**CHAT, "files": {"go.py": code}}
    score = ["sh", "-c", "echo 111 101 101 97 97 97 | tr ' ' '\\n' | cmp - found"]
    (played,) = play(record=record, command=["sh", "-c", f"python go.py && {CALL}"], score=score)
    assert played.reward == 1.0


def test_what_cannot_work_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="'gone' does not exist"):
        play(score=["true"], read=["gone"], folder=tmp_path)
    with pytest.raises(ConfigError, match="part of the system that the sandbox replaces"):
        play(score=["true"], read=["/"])
    with pytest.raises(ConfigError, match="is /, a part of the system"):
        play(score=["true"], read=["../" * 40], folder=tmp_path)
    with pytest.raises(ConfigError, match="score_is_printed: a reward returns its score"):
        play(score="exact-match", score_is_printed=True)
    with pytest.raises(EpisodeError, match="cannot start '/.*/gone.sh'"):
        play(score=["true"], command=["./gone.sh"], folder=tmp_path)


def test_episodes_at_once_do_not_see_each_other():
    engine = Recorded((WRITES, "Done."))
    command = ["sh", "-c", f"test -e greeting && exit 5; {CALL}; true"]
    played = play(engine=engine, samples=4, command=command, score=HAS_GREETING)
    assert [each.reward for each in played] == [1.0] * 4
    assert all(metrics(each)["own/program_failed"] == 0.0 for each in played)
