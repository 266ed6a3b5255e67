"""Write docs/reference/*.md from the code: `python docs/generate_reference.py [--check]`.

One page a kind: what core hands to `build`, what comes back, and the options of every plugin in this repository;
plugin-api.md, what a plugin may import; and every key of a run file, hook, error and command.
`tests/architecture/test_reference.py` fails when a committed page is not what this writes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from moved_names import with_moved_table
from public_surface import library_surface, plugin_page, transport_page
from pydantic import BaseModel
from reference_lists import commands_page, config_page, errors_page, hooks_page, table

from rlhf_cli.schema_text import option_rows
from rlhf_core import components
from rlhf_core.algorithm import DatasetAlgorithm, RolloutAlgorithm
from rlhf_core.components import KINDS
from rlhf_core.config.section import Section
from rlhf_core.config.sections import ModelConfig
from rlhf_core.config.select import shared_options
from rlhf_core.hookspecs import Action, MakerHooks, Moment, SetupHooks, TrainerHooks
from rlhf_core.models.kinds import ModelKind
from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import SelectedPlugin, has_options, load_ref
from rlhf_core.protocols import Logger, PromptSource, Reward, RolloutEngine
from rlhf_core.strategy import Strategy
from rlhf_core.training.request import RunRequest, Transport
from rlhf_episodes import (
    Endpoint,
    Environment,
    Outcome,
    Policy,
    Reply,
    Task,
    Tool,
    ToolFunction,
    UseTool,
    contract,
    converse,
    shapes,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
UPGRADING = ROOT / "docs" / "upgrading.md"
NOTE = "<!-- Written by docs/generate_reference.py from the code; change the code and run it again. -->"

TITLES = {
    "algorithms": "Algorithms",
    "strategies": "Strategies",
    "rewards": "Rewards",
    "transports": "Transports",
    "engines": "Engines",
    "prompts": "Prompt sources",
    "environments": "Environments",
    "hooks": "Hooks with options",
    "loggers": "Loggers",
    "sections": "Sections of the run file",
    "optimizers": "Optimizers",
    "schedules": "Schedules",
    "models": "Kinds of models",
}
CONTEXTS: dict[str, type] = {
    "algorithms": components.AlgorithmContext,
    "strategies": components.StrategyContext,
    "rewards": components.RewardContext,
    "transports": RunRequest,
    "engines": components.EngineContext,
    "prompts": components.TaskContext,
    "environments": components.TaskContext,
    "hooks": components.HookContext,
    "loggers": components.HookContext,
    "optimizers": components.OptimizerContext,
    "schedules": components.ScheduleContext,
    "models": ModelConfig,
}
RESULTS: dict[str, tuple[type, ...]] = {
    "algorithms": (RolloutAlgorithm, DatasetAlgorithm),
    "strategies": (Strategy,),
    "rewards": (Reward,),
    "transports": (Transport,),
    "engines": (RolloutEngine,),
    "prompts": (PromptSource,),
    "environments": (Environment, Task, Policy, Endpoint, Reply, Outcome),
    "hooks": (SetupHooks, TrainerHooks, MakerHooks, Moment, Action),
    "loggers": (Logger,),
    "optimizers": (),
    "schedules": (),
    "models": (ModelKind,),
}
CONTRACTS = {
    "algorithms": "AlgorithmContract` or `DatasetAlgorithmContract",
    "strategies": "StrategyContract",
    "rewards": "RewardContract",
    "transports": "TransportContract",
    "engines": "EngineContract",
    "prompts": "PromptsContract",
    "environments": "EnvironmentContract",
    "hooks": "HooksContract",
    "loggers": "LoggerContract",
}

_PAGES = dict.fromkeys(("optimizers", "schedules"), "kinds/optimizers.md") | {"models": "kinds/models.md"}
_GIVEN_BACK = {
    "optimizers": "## What it gives back\n\nA `torch.optim.Optimizer` over exactly these parameters, without state.",
    "schedules": "## What it gives back\n\nA function from an update's index to the factor of the peak learning rate.",
    "transports": "## What `build` gives back",
    "hooks": "## What it gives back: an object with any of these hooks; and what `rlhf_decide` is given and answers",
    "environments": "## What it gives back, and what that is given (or a class with `reset` and `step`, or with tools)",
}


def pages() -> dict[Path, str]:
    """Every page's path and text."""
    lists = {"config": config_page, "hook-events": hooks_page, "errors": errors_page, "commands": commands_page}
    return (
        {FOLDER / f"{kind}.md": page(kind) for kind in KINDS}
        | {UPGRADING: with_moved_table(UPGRADING.read_text(encoding="utf-8"))}
        | {FOLDER / "plugin-api.md": api_page(), FOLDER / "transport-api.md": transports_page()}
        | {FOLDER / "libraries.md": libraries_page()}
        | {FOLDER / f"{name}.md": made(NOTE) for name, made in lists.items()}
    )


def api_page() -> str:
    """What a plugin may import."""
    parts = [
        "# What a plugin may import",
        NOTE,
        "These names, from these modules, as they stand here: `from rlhf_core.rollout import named_weights`, never "
        "from a file in the folder `rollout/`. A name that `rlhf_core` itself has is listed there alone. Transports "
        "may import more: [transport-api.md](transport-api.md). The rest of core is private and may move in any "
        "release.",
    ]
    return "\n\n".join([*parts, *name_tables(plugin_page())]) + "\n"


def transports_page() -> str:
    """What only transports, commands and the test kit import."""
    parts = [
        "# What a transport may import besides",
        NOTE,
        "These names of core are for those who put a run together from its parts: transports, which do it in processes "
        "of their own, the trainers in the seed's style, commands, and the test kit. Other plugins need "
        "[plugin-api.md](plugin-api.md) only.",
    ]
    return "\n\n".join([*parts, *name_tables(transport_page())]) + "\n"


def libraries_page() -> str:
    """What a plugin may import of the libraries."""
    parts = [
        "# What a plugin may import of the libraries",
        NOTE,
        "A library is a distribution that several plugins share. Name it in `dependencies` if you import it.",
    ]
    return "\n\n".join([*parts, *name_tables(library_surface())]) + "\n"


def name_tables(public: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A heading and a table of names for each module."""
    return [
        part
        for module, names in public.items()
        for part in (f"## `{module}`", table(["name", ""], [[f"`{name}`", text] for name, text in names.items()]))
    ]


def page(kind: str) -> str:
    """The reference of one kind."""
    if kind == "sections":
        return sections_page()
    context, results = CONTEXTS[kind], RESULTS[kind]
    guide, suite = _PAGES.get(kind, "plugins.md"), CONTRACTS.get(kind)
    tested = f"; to test it, subclass `{suite}` of `rlhf_testing.contracts`" if suite else ""
    given = "`run(request)` is given" if kind == "transports" else "`build(config, context)` is given as `context`"
    parts = [
        f"# {TITLES[kind]}",
        NOTE,
        f"Entry-point group `rlhf.{kind}`. To write one, see [{Path(guide).name}](../{guide}){tested}.",
        f"## What {given}",
        f"`{context.__module__}.{context.__name__}`",
        *(fields_table(context) if is_dataclass(context) else ["The section `model` of the run file."]),
        _GIVEN_BACK.get(kind, "## What it gives back"),
    ]
    for result in results:
        members = fields_table(result) if is_dataclass(result) else methods(result)
        parts += [f"### `{result.__module__}.{result.__name__}`", inspect.getdoc(result) or "", *members]
    if kind == "environments":
        parts += tools_part()
    shared = shared_options(kind)
    if shared is not None and shared.model_fields:
        parts += ["## Options that core reads in every section", *options_table(shared)]
    parts.append("## The plugins of this repository")
    for selected in installed(kind):
        parts += plugin_part(selected, shared)
    return "\n\n".join(part for part in parts if part) + "\n"


def sections_page() -> str:
    """The reference of sections, which core builds nothing of."""
    parts = [
        f"# {TITLES['sections']}",
        NOTE,
        "Entry-point group `rlhf.sections`: the name of the entry point is the dotted name of the section. To write "
        "one, see [sections.md](../sections.md).",
        "## What its options subclass",
        "### `rlhf_core.Section`",
        inspect.getdoc(Section) or "",
        table(["member", "", "meaning"], [method_row(name, vars(Section)[name]) for name in ("check", "adapt")]),
        "## The plugins of this repository",
    ]
    for selected in installed("sections"):
        parts += plugin_part(selected, None)
    return "\n\n".join(parts) + "\n"


def tools_part() -> list[str]:
    """What an environment with a `run` of its own may use for tools."""
    aliases = {"Tool": Tool, "UseTool": UseTool}
    source = inspect.getsource(contract) + inspect.getsource(shapes)
    meanings = {
        ast.unparse(node.targets[0]): str(doc.value.value)
        for node, doc in itertools.pairwise(ast.parse(source).body)
        if isinstance(node, ast.Assign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }
    rows = [[f"`{name}`", f"`{str(alias).replace('|', 'or')}`", meanings[name]] for name, alias in aliases.items()]
    made = method_row("ToolFunction", ToolFunction.__init__)
    return [
        "## Tools in a `run` of your own",
        "From `rlhf_episodes`; an example is in [environments.md](../environments.md#2-tools).",
        table(["name", "", "meaning"], [method_row("converse", converse), made]),
        inspect.getdoc(converse) or "",
        "### `rlhf_episodes.ToolFunction`",
        inspect.getdoc(ToolFunction) or "",
        *methods(ToolFunction),
        "Its attributes: `name` (text), `schema` (a `Tool`), `function`.",
        table(["type", "is", "meaning"], rows),
    ]


def installed(kind: str) -> Iterable[SelectedPlugin]:
    """Those whose distribution lies in this repository, by name."""
    manifests = [
        ROOT / "pyproject.toml",
        *ROOT.glob("libraries/*/pyproject.toml"),
        *ROOT.glob("plugins/*/*/pyproject.toml"),
    ]
    ours = {
        line.split('"')[1] for path in manifests for line in path.read_text().splitlines() if line[:8] == 'name = "'
    }
    return [load_ref(ref) for ref in discover(kind).values() if ref.distribution in ours and has_options(ref)]


def plugin_part(selected: SelectedPlugin, shared: type[BaseModel] | None) -> list[str]:
    """Name, summary, what it needs, and the options that are its own."""
    component = selected.component
    says = inspect.getdoc(selected.function) if selected.function else None
    parts = [f"### `{selected.name}`", says or f"{component.summary.rstrip('.')}.", f"From `{selected.distribution}`."]
    if component.requires:
        parts.append(f"Needs {', '.join(f'`{name}`' for name in component.requires)}.")
    known = set(shared.model_fields) if shared is not None and issubclass(component.config, shared) else set()
    return [*parts, *(options_table(component.config, known) or ["No options of its own."])]


def options_table(model: type[BaseModel], known: Iterable[str] = ()) -> list[str]:
    """Options with type, bounds, default and meaning; those in `known` are told elsewhere."""
    rows = [[f"`{row[0]}`", f"`{row[1]}`", f"`{row[2]}`", row[3]] for row in option_rows(model) if row[0] not in known]
    return [table(["option", "type", "default", "meaning"], rows)] if rows else []


def fields_table(kind: type) -> list[str]:
    """A dataclass's fields, with the docstrings under them."""
    meanings = field_docs(kind)
    types = {name: str(text).replace("|", "or") for name, text in kind.__annotations__.items()}
    return [table(["field", "type", "meaning"], [[f"`{n}`", f"`{t}`", meanings.get(n, "")] for n, t in types.items()])]


def field_docs(kind: type) -> dict[str, str]:
    """The string that stands under each field."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    found: dict[str, str] = {}
    for field, doc in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return found


def methods(kind: type) -> list[str]:
    """Its public methods and properties, those of its bases in this project too."""
    owners = [each for each in reversed(kind.__mro__) if each.__module__.startswith("rlhf_")]
    members = {name: value for owner in owners for name, value in vars(owner).items()}
    public = {name: value for name, value in members.items() if not name.startswith("_") or name == "__call__"}
    if issubclass(kind, PromptSource):
        public |= {name: members[name] for name in ("__len__", "__getitem__")}
    rows = [method_row(name, value) for name, value in public.items() if callable(value) or isinstance(value, property)]
    return [table(["member", "", "meaning"], rows)]


def method_row(name: str, value: Any) -> list[str]:
    """One line: signature, whether it must be written, and the first line of its docstring."""
    function = value.fget if isinstance(value, property) else value
    signature = inspect.signature(function)
    parameters = [parameter for each, parameter in signature.parameters.items() if each != "self"]
    shown = str(signature.replace(parameters=parameters)).replace("'", "").replace("|", "or")
    required = getattr(function, "__isabstractmethod__", False)
    text = f"`{name}`: `{shown.removeprefix('() -> ')}`" if isinstance(value, property) else f"`{name}{shown}`"
    meaning = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return [text, "required" if required else "", meaning]


def main() -> int:
    """Write the pages, or with --check say which are not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page would change")
    check = parser.parse_args().check
    made = pages()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(made[path], encoding="utf-8")
        print(f"{'not up to date' if check else 'wrote'}: {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
