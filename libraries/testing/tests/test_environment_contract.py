"""The contract of environments fails for those that would break a run, and says what is wrong."""

from __future__ import annotations

import re
import sys

import pytest
from plugin_tests import run_pytest

PLUGINS = '''
import random
import time

class Fine:
    """Say more than the last time."""
    def __init__(self, *, bonus: float = 1.0):
        self.bonus = bonus
    def reset(self, task):
        self.word = str(task.seed % 100)
        return f"say {self.word}"
    def step(self, reply):
        found = self.word[0] in reply.text
        return "once more", self.bonus * found, found

class Words:
    """Tools that are methods."""
    def reset(self, answer=None):
        self.said = []
        return "Use the tool."
    def say(self, word: str) -> str:
        """Say a word.

        Args:
            word: the word.
        """
        self.said.append(word)
        return word * 2
    def get_reward(self) -> float:
        return float("yes" in self.said)

class Shared(Fine):
    """Counts over episodes."""
    count = 0
    def step(self, reply):
        Shared.count += 1
        return "once more", float(Shared.count), False

class Moody(Fine):
    """Draws lots."""
    def step(self, reply):
        return "once more", random.random(), False

class Each(Fine):
    """Another task for each sample."""
    def reset(self, task):
        self.word = str(task.sample_seed)
        return f"say {self.word}"

class Wrong(Fine):
    """A reward that is no number."""
    def step(self, reply):
        return "once more", float("nan"), False

class Brittle(Fine):
    """Takes the policy at its word."""
    def step(self, reply):
        return str(int(reply.text)), 0.0, False

class Pair(Fine):
    """Steps without a reward."""
    def step(self, reply):
        return "once more", 0.0

class Taken(Fine):
    """A metric by a name of core."""
    async def run(self, task, policy):
        from rlhf_episodes.contract import Outcome
        await policy.turn(self.reset(task))
        return Outcome(metrics={"num_turns_mean": 3.0})
'''
TESTS = """
from rlhf_testing.contracts import EnvironmentContract

class TestFine(EnvironmentContract):
    plugin = "bad-fine"

class TestFinePlain(EnvironmentContract):
    plugin = "bad-fine"
    chat = False
    options = {"bonus": 2.0}

class TestWords(EnvironmentContract):
    plugin = "bad-words"
    records = ({"prompt": "one"}, {"prompt": "two", "answer": 2})
    replies = (
        '<tool_call>{"name": "say", "arguments": {"word": "yes"}}</tool_call>',
        '<tool_call>{"name": "sai", "arguments": {"word": "yes"}}</tool_call>',
        '<tool_call>{"name": "say", "argumen',
    )
    max_turns = 3
"""
FOUND_BY = {
    "Shared": "test_the_same_seeds_give_the_same_episodes",
    "Moody": "test_an_episode_does_not_look_at_others",
    "Each": "test_the_samples_of_a_prompt_begin_alike",
    "Wrong": "test_episodes_end",
    "Brittle": "test_episodes_end",
    "Pair": "test_episodes_end",
    "Taken": "test_episodes_end",
}
FAULTS = "".join(f'\nclass Test{name}(EnvironmentContract):\n    plugin = "bad-{name.lower()}"\n' for name in FOUND_BY)


@pytest.mark.slow
def test_faults_are_found_and_named(install, tmp_path):
    names = re.findall(r"^class (\w+)", PLUGINS, flags=re.MULTILINE)
    targets = {"rlhf.environments": {f"bad-{name.lower()}": f"bad_games:{name}" for name in names}}
    install("bad-games", targets, {"bad_games": PLUGINS})
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "test_bad.py").write_text(TESTS + FAULTS)
    looked_at = " or ".join(["Fine", "Words", *(f"(Test{name} and {test})" for name, test in FOUND_BY.items())])
    report = run_pytest(tmp_path / "project", sys.path[0], select=looked_at)
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::(Test\w+::\w+)", report, flags=re.MULTILINE))
    assert "PASSED test_bad.py::TestWords::test_what_was_sampled_is_learnt_and_nothing_else" in report
    assert not {name for name in failed if name.startswith(("TestFine", "TestWords"))}, report
    assert {f"Test{name}::{test}" for name, test in FOUND_BY.items()} <= failed, report
    for hint in (
        "keep no state between episodes",
        "draw tasks from task.seed",
        "the reward of turn 0 is nan",
        "step raised ValueError: invalid literal for int()",
        "step returned ('once more', 0.0), not (observation, reward, done)",
    ):
        assert hint in report, f"{hint}\n{report}"
