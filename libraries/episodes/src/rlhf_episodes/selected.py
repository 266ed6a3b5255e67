"""The environment of a run file, checked outside of a run."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.problems import Problems
from rlhf_core.config.resolved import Configured
from rlhf_core.config.select import Selector
from rlhf_core.plugins.discovery import find
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust


def resolve_environment(data: Any, problems: Problems, trust: FileTrust = EVERY_FILE) -> Configured | None:
    """The section `environment`, checked: the environment that it names, with all options. None, and problems noted,
    where it is wrong.
    """
    return Selector(problems, trust).section(find("sections", "environment"), data)
