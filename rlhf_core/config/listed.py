"""Sections that list plugins by name, each with its options: `hooks` and `logging`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import PluginError
from ..plugins.discovery import load, missing_modules
from ..util.did_you_mean import suggestion
from .problems import Problems
from .section import options_of
from .sections import DEFAULT_LOGGER
from .selected import Configured

Check = Callable[[str, str, dict[str, Any]], Configured | None]
"""Selects the plugin `name` and checks its options, which stand at a path of the run file."""


def listed_plugins(
    section: str, given: Any, reserved: Sequence[str], problems: Problems, check: Check
) -> tuple[Configured, ...]:
    """The plugins that a section lists: `NAME: {option: value}`, or true (or nothing) for one with its defaults.

    NAME: false leaves one out. `reserved`: keys of the section that are no plugin's name.
    """
    if not isinstance(given, Mapping):
        return ()  # said where core's own keys of the section are checked
    found: list[Configured] = []
    for name, options in given.items():
        if name in reserved or options is False:
            continue
        path = f"{section}.{name}"
        if options is not None and options is not True and not isinstance(options, Mapping):
            hint = suggestion(name, reserved)
            problems.add(path, f"should be a mapping of options, true or false (given {options!r}){hint}")
            continue
        known = len(problems)
        configured = check(path, name, dict(options) if isinstance(options, Mapping) else {})
        if configured is None:
            if len(problems) > known and (near := suggestion(name, reserved)):
                problems.add(path, f"is no key of {section}{near}")
        elif any(each.name == configured.name for each in found):
            problems.add(path, f"{configured.name} is listed twice")
        else:
            found.append(configured)
    return tuple(found)


def with_default_logger(data: Any) -> Any:
    """TensorBoard is on where it is installed, unless the section says otherwise."""
    if DEFAULT_LOGGER in (data or {}) or not isinstance(data, dict | None):
        return data
    try:
        is_there = not missing_modules(load("loggers", DEFAULT_LOGGER, check_requires=False).component)
    except PluginError:
        is_there = False
    return {**(data or {}), DEFAULT_LOGGER: is_there}


def listed_mapping(plugins: Sequence[Configured]) -> dict[str, Any]:
    """Their part of the section: `listed_plugins` of it gives them again."""
    return {each.name: options_of(each.config) or True for each in plugins}
