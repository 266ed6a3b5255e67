"""Checks that the modules a component requires are installed, in a version that its distribution accepts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata, version
from importlib.util import find_spec

from ..components import Component
from ..util.did_you_mean import fold


def not_installed(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that cannot be found, without importing any."""
    return tuple(name for name in modules if find_spec(name.partition(".")[0]) is None)


def _wrong_versions(component: Component, distribution: str) -> dict[str, str]:
    """Return requirement (`mcp>=2,<3`) -> installed version, for required modules in an unacceptable version.

    The plugin's distribution lists acceptable versions in its metadata, also in extras. A module whose distribution has
    another name is not checked.
    """
    if not component.requires:
        return {}
    from packaging.requirements import Requirement

    try:
        about = metadata(distribution)
    except PackageNotFoundError:  # the plugin is a file
        return {}
    extras = ["", *(about.get_all("Provides-Extra") or ())]
    accepted: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, about.get_all("Requires-Dist") or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            accepted.setdefault(fold(requirement.name), []).append(requirement)
    wrong = {}
    for module in component.requires:
        choices = accepted.get(fold(module.partition(".")[0]), [])
        try:
            installed = version(choices[0].name) if choices else None
        except PackageNotFoundError:
            continue
        if installed and not any(each.specifier.contains(installed, prereleases=True) for each in choices):
            wrong[" or ".join(f"{each.name}{each.specifier}" for each in choices)] = installed
    return wrong


def unmet(component: Component, distribution: str | None = None) -> tuple[str, str] | None:
    """Return missing requirements and the command that installs them, or None. `distribution` enables version checks.

    Example: `("needs mcp>=2,<3, but 1.9.2 is installed", "pip install 'rlhf-mcp[mcp]'")`.
    """
    if missing := not_installed(component.requires):
        names = " ".join(name.partition(".")[0] for name in missing)
        return f"needs {', '.join(missing)}, not installed here", component.install or f"pip install {names}"
    if distribution and (wrong := _wrong_versions(component, distribution)):
        problem = ", ".join(f"{name}, but {installed} is installed" for name, installed in wrong.items())
        names = " ".join(f"'{name}'" for name in wrong)
        return f"needs {problem}", component.install or f"pip install {names}"
    return None
