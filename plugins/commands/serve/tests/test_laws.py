"""The laws of masks and ids hold for what agents do at the endpoint, by the contract of environments."""

from pathlib import Path
from typing import ClassVar

import pytest
from tool_models import CALL

from rlhf_testing.contracts import EnvironmentContract

HERE = Path(__file__).parent


class AgentContract(EnvironmentContract):
    """Of a class in a file, which no distribution gives a name."""

    test_one_distribution_gives_the_name = None


class TestAgentWithATool(AgentContract):
    plugin = f"{HERE / 'adding_agent.py'}:Adds"
    replies: ClassVar = (CALL, "3")


@pytest.mark.slow
class TestAgentThatWanders(AgentContract):
    plugin = f"{HERE / 'wandering_agent.py'}:Wanders"
    max_turns = 8

    def test_it_makes_branches(self, episodes) -> None:
        rows = [row for each in episodes.played for row in each.rows]
        assert any(row.num_shared_turns for row in rows), "a call continued one that another had continued"
        assert any(row.branch and not row.num_shared_turns for row in rows), "a history was edited"
        assert any(len(row.own_turns) > 1 for row in rows), "a call continued another"
