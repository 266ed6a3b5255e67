"""Entry points in groups that no kind of plugin has, such as `rlhf.reward` for `rlhf.rewards`: nothing reads them."""

from __future__ import annotations

from importlib.metadata import entry_points

from ..util.did_you_mean import fold, suggestion

_PREFIX = "rlhf."


def strays(kinds: tuple[str, ...], name: str | None = None) -> list[str]:
    """A sentence for each, or for each of that name. Reads metadata only; `kinds` are those that core reads."""
    known = [f"{_PREFIX}{kind}" for kind in kinds]
    installed = entry_points()
    groups = [group for group in sorted(installed.groups) if group.startswith(_PREFIX) and group not in known]
    return [
        f'"{entry.name}" of {entry.dist.name if entry.dist else "a distribution"} is in the group {group}, '
        f"which nothing reads{suggestion(group, known)}"
        for group in groups
        for entry in installed.select(group=group)
        if name is None or fold(entry.name) == fold(name)
    ]
