"""A new plugin's distribution from the templates beside this module: `rlhf plugins new`."""

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
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SUFFIX = ".tmpl"


@dataclass(frozen=True, slots=True)
class Template:
    """Per-kind settings of a template, apart from its files."""

    singular: str
    usage: str
    """Lines of a run file that select the plugin."""
    where: str
    """Sentence on where the author's own code goes."""
    module: str = "plugin"
    """Module of the package that the entry point names."""
    attribute: str = "{{snake}}"
    needs: tuple[str, ...] = ("rlhf-core",)
    """Distributions that it imports. A reward and an environment can be written without any."""


TEMPLATES: Mapping[str, Template] = {
    "rewards": Template(
        "reward",
        "rewards:\n  - {name: {{name}}, weight: 1.0, target_tokens: 64}",
        "The reward is the function in `src/{{package}}/reward.py`; its keyword-only parameters are its options.",
        module="reward",
        needs=(),
    ),
    "algorithms": Template(
        "algorithm",
        "algorithm: {name: {{name}}, max_advantage: 5.0}",
        "The mathematics is in `src/{{package}}/algorithm.py`, its options in `config.py`.",
        needs=("rlhf-core", "rlhf-forward"),
    ),
    "strategies": Template(
        "strategy",
        "strategy: {name: {{name}}, num_threads: 4}",
        "How a model is wrapped and stepped is in `src/{{package}}/strategy.py`, its options in `config.py`.",
        needs=("rlhf-core", "rlhf-strategies"),
    ),
    "engines": Template(
        "engine",
        "engine: {name: {{name}}, max_new_tokens: 64}",
        "The sampling is in `src/{{package}}/engine.py`, its options in `config.py`.",
        needs=("rlhf-core", "rlhf-forward"),
    ),
    "transports": Template(
        "transport",
        "transport: {name: {{name}}, max_minutes: 60}",
        "Where a run happens is in `src/{{package}}/transport.py`, its options in `config.py`.",
    ),
    "prompts": Template(
        "prompts",
        "prompts: {name: {{name}}, size: 1000}",
        "The records are made in `src/{{package}}/source.py`, its options in `config.py`.",
    ),
    "environments": Template(
        "environment",
        "environment: {name: {{name}}, num_steps: 3, max_turns: 4}",
        "The environment is the class in `src/{{package}}/environment.py`; the keyword-only parameters of its\n"
        "constructor are its options.",
        module="environment",
        attribute="{{Camel}}",
        needs=("rlhf-episodes",),
    ),
    "advantages": Template(
        "advantage",
        "algorithm: {name: grpo, advantage: {name: {{name}}, max_advantage: 1.0}}",
        "The estimator is the function in `src/{{package}}/advantage.py`; its keyword-only parameters are its options.",
        module="advantage",
        needs=("rlhf-core", "rlhf-objective"),
    ),
    "policy_losses": Template(
        "policy-loss",
        "algorithm: {name: grpo, policy_loss: {name: {{name}}, max_ratio: 4.0}}",
        "The loss is the function in `src/{{package}}/policy_loss.py`; its keyword-only parameters are its options.",
        module="policy_loss",
        needs=("rlhf-core", "rlhf-objective"),
    ),
    "hooks": Template(
        "hooks",
        "hooks: {disable: [{{name}}]}   # it is on wherever it is installed",
        "The hooks are in `src/{{package}}/hooks.py`; `docs/hooks.md` of rlhf lists them all.",
        module="hooks",
        attribute="{{Camel}}",
    ),
    "loggers": Template(
        "logger",
        "logging:\n  {{name}}: {path: {{name}}.txt}",
        "Where the numbers go is in `src/{{package}}/logger.py`, its options in `config.py`.",
    ),
    "sections": Template(
        "section",
        "{{name}}: {max_answers: 100000}",
        "The options, the cross-check and the adaptation are in `src/{{package}}/section.py`.",
        module="section",
    ),
    "optimizers": Template(
        "optimizer",
        "optimizer: {name: {{name}}, lr: 1.0e-4, momentum: 0.9}",
        "The step is in `src/{{package}}/optimizer.py`, its options in `config.py`.",
    ),
    "schedules": Template(
        "schedule",
        "optimizer: {schedule: {name: {{name}}, lowest: 0.1}}",
        "The factor of the learning rate is in `src/{{package}}/schedule.py`, its options in `config.py`.",
    ),
}
"""By kind, as in the entry-point group."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """The files written for a new plugin."""

    folder: Path
    distribution: str
    files: tuple[Path, ...]
    """Relative to the folder."""


def new_plugin(kind: str, name: str, output: Path | None = None) -> Scaffold:
    """Write the distribution of a new plugin; `kind` as in the entry-point group.

    Raises `UserInputError`: no template for the kind, an unfit or taken name, or a folder that is not empty.
    """
    template = _template(kind)
    _check_name(kind, name)
    distribution = f"rlhf-{template.singular}-{name}"
    folder = output if output is not None else Path(distribution)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserInputError("is there already", where=str(folder), hint="give another folder: --output DIR")
    values = _values(kind, name, distribution, template)
    written: list[Path] = []
    with as_file(files("rlhf_cli") / "templates" / "plugin") as templates:
        for source in (templates / "common", templates / template.singular):
            for path in sorted(each for each in source.rglob(f"*{_SUFFIX}") if each.is_file()):
                relative = _target(path.relative_to(source), values)
                target = folder / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_fill(path.read_text(encoding="utf-8"), values), encoding="utf-8")
                written.append(relative)
    return Scaffold(folder, distribution, tuple(sorted(written)))


def _template(kind: str) -> Template:
    if kind not in TEMPLATES:
        known = ", ".join(each.singular for each in TEMPLATES.values())
        raise UserInputError(f'there is no template of kind "{kind}"', where="plugins new", hint=f"kinds: {known}")
    return TEMPLATES[kind]


def _check_name(kind: str, name: str) -> None:
    from rlhf_core.plugins.discovery import discover
    from rlhf_core.plugins.known import KNOWN
    from rlhf_core.util.did_you_mean import fold

    where = f'plugins new: name "{name}"'
    if not _NAME.fullmatch(name):
        raise UserInputError("is not of small letters, digits and single dashes", where=where, hint="such as my-name")
    snake = name.replace("-", "_")
    if keyword.iskeyword(snake):
        raise UserInputError("is a word of Python itself", where=where, hint="give it another name")
    installed = discover(kind).get(fold(name))
    owner = installed.distribution if installed else KNOWN.get(kind, {}).get(name)
    if owner is not None:
        raise UserInputError(f"is taken by {owner}: two plugins of one name cannot be selected", where=where)


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
    }
    values["dependencies"] = ", ".join(f'"{each}>={values["core_version"]}"' for each in template.needs)
    values["target"] = f"{values['package']}.{template.module}:{_fill(template.attribute, values)}"
    for key in ("usage", "where"):
        values[key] = _fill(getattr(template, key), values)
    return values


def _target(path: Path, values: Mapping[str, str]) -> Path:
    """Target path of a template. Test templates lie in a folder not named `tests`, so our wheel seems to hold none."""
    text = path.as_posix().removesuffix(_SUFFIX)
    for placeholder, name in (("package", values["package"]), ("snake", values["snake"]), ("tests", "tests")):
        text = text.replace(f"__{placeholder}__", name)
    return Path(text)


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)
