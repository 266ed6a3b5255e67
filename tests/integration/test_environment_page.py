"""The loop of tools that `docs/environments.md` shows plays an episode as it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

from rlhf_core.plugins.functions import run_file
from rlhf_core.types import ToolCall

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


class Scripted:
    """A policy that makes these calls, one a turn, and then none."""

    def __init__(self, *calls: ToolCall) -> None:
        self.calls, self.seen = list(calls), []
        self.remaining_turns = 9

    async def turn(self, messages=None, tools=(), stop=()):
        self.seen.append(messages)
        calls = (self.calls.pop(0),) if self.calls else ()
        return SimpleNamespace(tool_calls=calls, finish_reason="stop")


def test_the_page_shows_a_loop_of_tools(tmp_path):
    blocks = re.findall(r"```python\n(# notes\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "notes.py").write_text(blocks[0])
    notes = run_file(tmp_path / "notes.py", "the page").Notes()
    right, wrong = {"topic": "capital of France"}, {"about": "it"}
    policy = Scripted(*(ToolCall(name="look_up", arguments=each) for each in (right, wrong)))
    outcome = asyncio.run(notes.run(None, policy))
    assert (outcome.status, outcome.reward) == ("done", 1.0)
    answers = [each[0]["content"] for each in policy.seen[1:]]
    assert answers[0] == "Paris"
    assert 'there is no argument "about"' in answers[1] and 'argument "topic" is missing' in answers[1]
