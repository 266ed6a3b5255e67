"""Sections of a run file that plugins bring: the entry-point group `rlhf.sections`."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import PluginError
from ..plugins.discovery import PluginRef, discover
from .resolved import INVALID, SelectedSection
from .select import Selector, section_model

logger = logging.getLogger("rlhf")


def take_sections(given: dict[str, Any], select: Selector) -> dict[str, SelectedSection]:
    """Take the sections of plugins out of the run file `given`, and check their options.

    A section with problems is `INVALID`. A nested section may be in another one of a plugin.
    """
    refs = sorted(discover("sections").values(), key=lambda ref: ref.name.count("."))
    values = {ref.name: _pop(given, ref.name) for ref in reversed(refs)}
    found: dict[str, SelectedSection] = {}
    for ref in refs:
        value = values[ref.name]
        if value is None and not _is_active_when_absent(ref):
            continue
        found[ref.name] = select.section(ref, value) or INVALID
    return found


def _pop(given: Any, name: str) -> Any:
    """Remove the value of a dotted key; None if there is none."""
    *parents, last = name.split(".")
    for part in parents:
        given = given.get(part) if isinstance(given, dict) else None
    return given.pop(last, None) if isinstance(given, dict) else None


def _is_active_when_absent(ref: PluginRef) -> bool:
    try:
        return any(section_model(each).active_when_absent for each in (ref, *ref.clashes))
    except PluginError as error:
        logger.warning("the section %s is ignored: %s", ref.name, error)
        return False
