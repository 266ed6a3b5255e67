"""Reference pages with lists: keys of a run file, hooks, errors, commands."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel
from reference_api import prose

from rlhf_cli.schema_text import option_rows
from rlhf_core.config.sections import RunConfig
from rlhf_core.config.select import section_models
from rlhf_core.errors import RlhfError
from rlhf_core.hookspecs import SPECS

ROOT = Path(__file__).resolve().parents[1]


def config_page(note: str) -> str:
    """Return the page of every key that core reads, by section. Options of plugins are on the pages of their kinds."""
    parts = [
        "# Every key of a run file",
        note,
        "The sections of [a run file](../run-file.md). A section with a `name` also has the options of that plugin: "
        "[algorithms](algorithms.md), [strategies](strategies.md), [engines](engines.md), [prompts](prompts.md), "
        "[rewards](rewards.md), [environments](environments.md), [transports](transports.md).",
    ]
    for name, model in config_sections():
        parts += [f"## `{name}`", prose(inspect.getdoc(model)), table(KEYS, list(_rows(name, model)))]
    return "\n\n".join(parts) + "\n"


KEYS = ["key", "type", "default", "meaning"]


def config_sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each section and its model, nested ones after their parent. `rewards` is each entry of the list."""
    yield "top level", RunConfig
    seen: set[type[BaseModel]] = set()
    todo = [(name, field.annotation) for name, field in RunConfig.model_fields.items()]
    todo += SHARED_SECTIONS + [(name, model) for name, model in section_models().items() if _is_ours(model)]
    while todo:
        name, annotation = todo.pop(0)
        for model in _models(annotation):
            if model not in seen:
                seen.add(model)
                yield name, model
                todo[:0] = [(f"{name}.{key}", field.annotation) for key, field in model.model_fields.items()]


def _is_ours(model: type[BaseModel]) -> bool:
    """Whether the model is of a distribution of this repository that is not an example."""
    package = model.__module__.partition(".")[0]
    return package.startswith("rlhf_") and not package.startswith("rlhf_example_")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models(each)


def _shared() -> list[tuple[str, Any]]:
    from rlhf_core.config.load import PLUGIN_SECTIONS
    from rlhf_core.config.select import CORE_OPTIONS

    places = {**PLUGIN_SECTIONS, "rewards.N": "rewards"}
    shared = [(section, CORE_OPTIONS.get(kind)) for section, kind in places.items()]
    return [(section, model) for section, model in shared if model is not None and model.model_fields]


SHARED_SECTIONS = _shared()


def _rows(section: str, model: type[BaseModel]) -> Iterator[list[str]]:
    prefix = "" if section == "top level" else f"{section}."
    for name, kind, default, meaning in option_rows(model):
        yield [f"`{prefix}{name}`", f"`{kind}`", f"`{default}`", meaning]


def hooks_page(note: str) -> str:
    """Return the page of every hook with its arguments, by the process that calls it."""
    parts = [
        "# Every hook",
        note,
        "[hooks.md](../hooks.md) describes how hooks are written, selected and ordered. A hook takes the arguments it "
        "needs, by name.",
    ]
    module = importlib.import_module("rlhf_core.hookspecs")
    parts.append("```text\n" + inspect.cleandoc(module.__doc__ or "") + "\n```")
    for spec in SPECS.values():
        parts += [f"## {spec.__name__}", prose(inspect.getdoc(spec))]
        for name, function in vars(spec).items():
            if name.startswith("rlhf_"):
                taken = [each for each in inspect.signature(function).parameters if each != "self"]
                parts += [f"### `{name}`", f"Arguments: {', '.join(f'`{each}`' for each in taken) or 'none'}."]
                parts.append(prose(inspect.getdoc(function)))
    return "\n\n".join(part for part in parts if part) + "\n"


def errors_page(note: str) -> str:
    """Return the page of every error, with the exit code of the command."""
    parts = [
        "# Every error",
        note,
        "Each message contains the place, the problem and a hint. The command prints it without a traceback (which is "
        "in `run.log`) and exits with the code below. In Python these errors are raised.",
    ]
    rows = [
        [f"`{name}`", f"`{module}`", f"`{base}`", str(code), text] for name, module, base, code, text in error_classes()
    ]
    parts.append(table(["error", "module", "is a", "exit code", "meaning"], rows))
    parts.append(
        "System errors with a known cause (a full disk, a port in use) are converted to these. Ctrl-C ends a run with "
        "exit code 130."
    )
    return "\n\n".join(parts) + "\n"


def error_classes() -> Iterator[tuple[str, str, str, int, str]]:
    """Yield name, module, base, exit code and summary of every error class that a user can see."""
    codes = {"RlhfError": RlhfError.exit_code}
    classes = list(_error_definitions())
    known = 0
    while known < len(codes):  # until an iteration does not find another subclass
        known = len(codes)
        for _, node in classes:
            if _base(node) in codes:
                codes.setdefault(node.name, _own_code(node) or codes[_base(node)])
    for module, node in classes:
        if node.name in codes:
            text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            yield node.name, module, _base(node), codes[node.name], text


def _error_definitions() -> Iterator[tuple[str, ast.ClassDef]]:
    roots = [ROOT, ROOT / "cli", *sorted(ROOT.glob("libraries/*/src")), *sorted(ROOT.glob("plugins/*/*/src"))]
    for root in roots:
        packages = [root / "rlhf_core"] if root == ROOT else [root]
        for path in (path for package in packages for path in sorted(package.rglob("*.py"))):
            if "templates" not in path.parts:
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                tree = ast.parse(path.read_text(encoding="utf-8"))
                yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _base(node: ast.ClassDef) -> str:
    return ast.unparse(node.bases[0]).rpartition(".")[2] if node.bases else ""


def _own_code(node: ast.ClassDef) -> int | None:
    for each in node.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "exit_code":
            return int(ast.literal_eval(each.value))
    return None


def commands_page(note: str) -> str:
    """Return the page of every command with its arguments and options."""
    from rlhf_cli.main import cli

    parts = ["# Every command", note, "`rlhf COMMAND --help` prints the same."]
    parts += _command_parts(cli, click.Context(cli, info_name="rlhf", terminal_width=100, **cli.context_settings))
    return "\n\n".join(part for part in parts if part) + "\n"


def _command_parts(command: click.Command, context: click.Context) -> list[str]:
    parts: list[str] = []
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            parts += _command_parts(inner, click.Context(inner, info_name=name, parent=context, terminal_width=100))
        return parts
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    return [f"## `{context.command_path}`", f"```text\n{text}\n```"]


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
