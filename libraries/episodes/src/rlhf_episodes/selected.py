"""Checks the section `environment` of a run file outside a run, and rewards of an environment's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.config.load import parse_reward
from rlhf_core.config.problems import Problems
from rlhf_core.config.resolved import Configured
from rlhf_core.config.select import Selector
from rlhf_core.plugins.discovery import find
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust

if TYPE_CHECKING:
    from rlhf_core.components import RewardContext

    from .part_rewards import PartRewards


def reward_section(text: str) -> dict[str, Any]:
    """Return the section of a reward in its short form.

    Args:
        text: `NAME` or `FILE.py:FUNCTION`, with `:WEIGHT` or without.

    Returns:
        The section, with the reward's name and weight.

    Raises:
        ConfigError: The weight is not a finite number.
    """
    return parse_reward(text)


def own_rewards(sections: Sequence[Mapping[str, Any]], context: RewardContext, *, where: str) -> PartRewards:
    """Select rewards with which an environment scores its own episodes. They are built at the first use.

    Args:
        sections: Sections of the rewards.
        context: Device, seed and model path.
        where: Place of the sections in the run file.

    Returns:
        The rewards.

    Raises:
        ConfigError: A section has problems.
    """
    from .part_rewards import PartRewards

    problems = Problems()
    rewards = Selector(problems).rewards(list(sections), where, has_player=False)
    problems.raise_if_any(where)
    return PartRewards(rewards, context)


def resolve_environment(data: Any, problems: Problems, trust: FileTrust = EVERY_FILE) -> Configured | None:
    """Check a section `environment` and select the environment that it names.

    Args:
        data: The section as read from the run file: a mapping with the key `name` and options.
        problems: Collects the problems found.
        trust: Which files of the run file may be executed.

    Returns:
        The environment with all options, or None if there are problems.
    """
    return Selector(problems, trust).section(find("sections", "environment"), data)
