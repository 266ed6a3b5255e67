"""Creates the distribution of a new plugin from the templates in `templates/`: `rlhf plugins new`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path

from rlhf_core.components import API_VERSION
from rlhf_core.errors import UserInputError

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|__(package|snake|tests)__")
_SUFFIX = ".tmpl"


@dataclass(frozen=True, slots=True)
class Template:
    """Per-kind settings of a template, apart from its files."""

    singular: str
    """The folder of the template, and part of the distribution's name."""
    target: str = "plugin:{{snake}}"
    """Target of the entry point in the new package."""
    needs: tuple[str, ...] = ("rlhf-core",)
    """Distributions that the new package imports. Rewards and environments do not need core."""


TEMPLATES: Mapping[str, Template] = {
    "rewards": Template("reward", "reward:{{snake}}", needs=()),
    "algorithms": Template("algorithm", needs=("rlhf-core", "rlhf-forward")),
    "strategies": Template("strategy", needs=("rlhf-core", "rlhf-strategies")),
    "engines": Template("engine", needs=("rlhf-core", "rlhf-forward", "rlhf-models")),
    "transports": Template("transport"),
    "prompts": Template("prompts"),
    "environments": Template("environment", "environment:{{Camel}}", needs=("rlhf-episodes",)),
    "advantages": Template("advantage", "advantage:{{snake}}", needs=("rlhf-core", "rlhf-objective")),
    "policy_losses": Template("policy-loss", "policy_loss:{{snake}}", needs=("rlhf-core", "rlhf-objective")),
    "hooks": Template("hooks", "hooks:{{Camel}}"),
    "loggers": Template("logger"),
    "sections": Template("section", "section:{{snake}}"),
    "optimizers": Template("optimizer"),
    "schedules": Template("schedule"),
}
"""Templates by kind, as in the entry-point group."""


def new_plugin(kind: str, name: str, output: Path | None = None) -> tuple[Path, list[Path]]:
    """Write the distribution of a new plugin.

    Args:
        kind: Kind of the plugin, as in the entry-point group.
        name: Name of the plugin.
        output: Folder to create. Default: the distribution's name.

    Returns:
        The folder, and its files relative to it.

    Raises:
        UserInputError: The kind does not have a template, the name is malformed or taken, or the folder is not empty.
    """
    if (template := TEMPLATES.get(kind)) is None:
        known = ", ".join(each.singular for each in TEMPLATES.values())
        raise UserInputError(f'no template for plugins of kind "{kind}"', where="plugins new", hint=f"kinds: {known}")
    _check_name(kind, name)
    distribution = f"rlhf-{template.singular}-{name}"
    folder = output if output is not None else Path(distribution)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError("already exists", where=str(folder), hint="specify another folder: --output DIR")
    values = _values(kind, name, distribution, template)
    written: list[Path] = []
    with as_file(files("rlhf_cli") / "templates" / "plugin") as templates:
        for source in (templates / "common", templates / template.singular):
            for path in sorted(each for each in source.rglob(f"*{_SUFFIX}") if each.is_file()):
                relative = Path(_fill(path.relative_to(source).as_posix().removesuffix(_SUFFIX), values))
                target = folder / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_fill(path.read_text(encoding="utf-8"), values), encoding="utf-8")
                written.append(relative)
    return folder, sorted(written)


def _check_name(kind: str, name: str) -> None:
    from rlhf_core.plugins.discovery import discover
    from rlhf_core.plugins.names import KNOWN
    from rlhf_core.util.did_you_mean import fold

    where = f'plugins new: name "{name}"'
    if not _NAME.fullmatch(name):
        raise UserInputError("must be lowercase letters, digits and single dashes", where=where, hint="e.g. my-name")
    snake = name.replace("-", "_")
    if keyword.iskeyword(snake):
        raise UserInputError("is a keyword of Python", where=where, hint="choose another name")
    installed = discover(kind).get(fold(name))
    owner = installed.distribution if installed else KNOWN.get(kind, {}).get(name)
    if owner is not None:
        raise UserInputError(f"is taken by {owner}: two plugins of the same name cannot be selected", where=where)


def _values(kind: str, name: str, distribution: str, template: Template) -> dict[str, str]:
    from rlhf_core.plugins.discovery import SINGULAR

    values = {
        "kind": kind,
        "name": name,
        "singular": template.singular,
        "noun": SINGULAR[kind],
        "snake": name.replace("-", "_"),
        "Camel": "".join(part.capitalize() for part in name.split("-")),
        "distribution": distribution,
        "package": distribution.replace("-", "_"),
        "core_version": version("rlhf-core"),
        "api_version": str(API_VERSION),
        "tests": "tests",
    }
    values["dependencies"] = ", ".join(f'"{each}>={values["core_version"]}"' for each in template.needs)
    values["target"] = f"{values['package']}.{_fill(template.target, values)}"
    return values


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Replace `{{name}}` in a text, or `__name__` in a path, with its value.

    The folder of test templates is not named `tests`, so that our wheel does not appear to contain tests.

    Example:
        >>> _fill("{{name}}/__snake__.py", {"name": "my-reward", "snake": "my_reward"})
        'my-reward/my_reward.py'
    """
    return _PLACEHOLDER.sub(lambda match: values[match[1] or match[2]], text)
