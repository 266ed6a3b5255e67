"""An agent that drives itself in a process of its own: its endpoint is the run's."""

from pathlib import Path

import asking_agent
import pytest

from rlhf_core.config.problems import Problems
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.episodes import episode_tokenizer, play_episodes


@pytest.mark.usefixtures("nothing_is_left")
def test_its_episodes_are_those_without():
    found = []
    for isolate in (False, True):
        problems = Problems()
        name = f"{Path(asking_agent.__file__)}:Asks"
        environment = resolve_environment({"name": name, "isolate": isolate}, problems)
        problems.raise_if_any("environment")
        found.append(play_episodes(environment, episode_tokenizer(chat=False), replies=["12", "345"], num_prompts=2))
    here, there = found
    assert there.values == here.values
    assert [len(each.turn_rewards) for each in here.played] == [2] * 4
