"""`--dry-run` plays one turn of an environment with a made-up answer."""

from __future__ import annotations

import pytest

from rlhf_core import train
from rlhf_core.errors import EpisodeError
from rlhf_testing.runs import tiny_run

GAME = """
from pathlib import Path
from rlhf_episodes import Outcome

LOG = Path(__file__).with_name("log")

class Fine:
    def reset(self, task):
        return "go>"
    def step(self, reply):
        with LOG.open("a") as log:
            log.write("step\\n")
        return "on>", 1.0, False

class Run:
    async def run(self, task, policy):
        reply = await policy.turn(task.prompt.text)
        return Outcome(reward=reply.nothing)

class Early:
    def reset(self, task):
        raise KeyError("level")
    def step(self, reply):
        return "", 0.0, True

class Hangs:
    def reset(self, task):
        return "go>"
    def step(self, reply):
        import time
        time.sleep(600)
"""


@pytest.fixture
def dry_run(tmp_path):
    (tmp_path / "game.py").write_text(GAME)

    def play(name, **options):
        environment = {"name": f"{tmp_path / 'game.py'}:{name}", **options}
        run = tiny_run({"environment": environment, "rewards": []})
        assert train(run, dry_run=True) is None

    return play


@pytest.mark.parametrize("isolate", [False, True])
def test_a_right_one_is_asked_once(dry_run, tmp_path, isolate):
    dry_run("Fine", isolate=isolate)
    assert (tmp_path / "log").read_text() == "step\n"


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Run", {}, r"raised AttributeError: .*nothing.*game.py, line 18"),
        ("Run", {"isolate": True}, "AttributeError"),
        ("Early", {}, "reset raised KeyError: 'level'"),
        ("Hangs", {"isolate": True, "timeout_seconds": 2.0}, "2 s"),
    ],
    ids=["later", "isolated", "at once", "hangs"],
)
@pytest.mark.slow_except("later", "isolated", "at once")
def test_an_error_is_found_before_anything_is_sampled(dry_run, name, options, problem):
    with pytest.raises(EpisodeError, match=problem):
        dry_run(name, **options)


def test_a_failure_that_the_run_allows_is_allowed(dry_run):
    dry_run("Run", on_failure="zero")
