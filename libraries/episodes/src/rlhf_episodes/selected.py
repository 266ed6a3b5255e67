"""Checks the section `environment` of a run file outside a run."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.problems import Problems
from rlhf_core.config.resolved import Configured
from rlhf_core.config.select import Selector
from rlhf_core.plugins.discovery import find
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust


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
