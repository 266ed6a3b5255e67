"""Nothing that a user or a plugin author can name is without a page. What is there is asked of the code itself."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions, entry_points
from pathlib import Path
from types import ModuleType

import pytest

from rlhf_core.components import KINDS
from rlhf_core.config.select import shared_options
from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import has_options, load_ref

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
METRIC = re.compile(
    r"(?:reward|reward_calls|kl|policy|critic|loss|value|returns|group|off_policy|sft|preference|data|response|rollout|"
    r"staleness|environment|eval|time|tokens_per_second|memory|sync|transport|distill|advantage)/[\w@{}./-]+"
)
NO_METRICS = {"eval/sampled", "memory/memory.limit_in_bytes"}
GROUPS = {
    "advantages": "losses",
    "policy_losses": "losses",
    "endpoints": "commands",
    "quickstarts": "commands",
    "reward_callers": "rewards",
    "loggers": "hooks",
    "sections": "README",
    "schedules": "optimizers",
}
"""Groups of entry points whose rules are on the page of another."""


@cache
def names_on(*pages: Path) -> set[str]:
    return {name for page in pages for name in re.findall(r"`([^`\s]+)`", page.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def lists(monkeypatch_module: pytest.MonkeyPatch) -> ModuleType:
    """The module that writes the lists of the reference."""
    monkeypatch_module.syspath_prepend(str(DOCS))
    return importlib.import_module("reference_lists")


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_every_key_of_a_run_file_has_its_row(lists: ModuleType) -> None:
    keys = {
        key if section == "top level" else f"{section}.{key}"
        for section, model in lists.config_sections()
        for key in model.model_fields
    }
    missing = keys - names_on(DOCS / "reference" / "config.md")
    assert len(keys) > 80 and not missing, f"docs/reference/config.md lacks {sorted(missing)}: run make docs"


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_every_plugin_has_its_row(kind: str) -> None:
    page = (DOCS / "reference" / f"{kind}.md").read_text(encoding="utf-8")
    shared = set(shared.model_fields) if (shared := shared_options(kind)) else set()
    missing = []
    for ref in discover(kind).values():
        if not ref.distribution.startswith("rlhf-") or not has_options(ref):
            continue
        selected = load_ref(ref)
        part = page.partition(f"### `{selected.name}`\n")[2].partition("\n### `")[0]
        options = set(selected.component.config.model_fields) - shared
        missing += [f"{selected.name}: {option}" for option in options if f"`{option}`" not in part]
    assert not missing, f"docs/reference/{kind}.md lacks {missing}: run make docs"


def test_every_error_has_its_row(lists: ModuleType) -> None:
    classes = list(lists.error_classes())
    errors = {name for name, *_ in classes}
    missing = errors - names_on(DOCS / "reference" / "errors.md")
    assert len(errors) > 15 and not missing, f"docs/reference/errors.md lacks {sorted(missing)}: run make docs"
    untold = [name for name, *_, says in classes if not says]
    assert not untold, f"these errors have no docstring: {untold}"


def test_every_hook_has_its_part(lists: ModuleType) -> None:
    hooks = {name for spec in lists.SPECS.values() for name in vars(spec) if name.startswith("rlhf_")}
    missing = hooks - names_on(DOCS / "reference" / "hook-events.md")
    assert hooks and not missing, f"docs/reference/hook-events.md lacks {sorted(missing)}: run make docs"


def test_every_command_has_its_part() -> None:
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    ours = {entry.name for entry in entry_points(group="rlhf.commands") if entry.dist.name.startswith("rlhf-")}
    missing = [name for name in ours | {"train", "config check", "plugins new"} if f"## `rlhf {name}" not in page]
    assert not missing, f"docs/reference/commands.md lacks {missing}: run make docs"


def metrics_of(path: Path) -> Iterator[str]:
    """Strings of a file that are keys of metrics; what is filled in stands in <>."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if METRIC.fullmatch(text) and not text.endswith(("/", ".md", ".py", ".jsonl")) and text not in NO_METRICS:
            yield text


def test_every_metric_is_told(library_files: list[Path]) -> None:
    told = names_on(DOCS / "metrics.md")
    places: dict[str, str] = {}
    for path in library_files:
        if not {"testing", "rlhf_report", "templates"} & set(path.parts):
            places |= dict.fromkeys(metrics_of(path), path.relative_to(ROOT).as_posix())
    filled = {re.sub(r"<\w+>", "{}", name) for name in told}
    missing = {key: place for key, place in places.items() if key not in filled}
    assert len(places) > 50 and not missing, f"docs/metrics.md says nothing of {missing}"


def test_ppo_is_told_whole() -> None:
    """Its options and metrics; those of the other algorithms are asked for in test_algorithm_docs.py."""
    page = names_on(DOCS / "algorithms" / "ppo.md") | names_on(DOCS / "algorithms" / "policy-objective.md")
    options = set(load_ref(discover("algorithms")["ppo"]).component.config.model_fields)
    files = (ROOT / "plugins" / "algorithms" / "ppo" / "src").rglob("*.py")
    metrics = {key for path in files for key in metrics_of(path) if "{" not in key}
    assert not options - page and not metrics - page, f"docs/algorithms/ppo.md lacks {options - page | metrics - page}"


def test_every_kind_of_plugin_has_a_page_of_rules() -> None:
    groups = {entry.group for installed in distributions() for entry in installed.entry_points}
    kinds = {group.removeprefix("rlhf.") for group in groups if group.startswith("rlhf.")} | set(KINDS)
    missing = [kind for kind in sorted(kinds) if not (DOCS / "kinds" / f"{GROUPS.get(kind, kind)}.md").exists()]
    assert not missing, f"docs/kinds has no page about {missing}"


def test_every_rule_of_a_contract_is_told_in_words() -> None:
    """Each test of each contract suite stands on the page of its kind, or on that of all kinds."""
    told = names_on(*DOCS.glob("kinds/*.md"))
    missing = [
        f"{path.stem}: {node.name}"
        for path in sorted((ROOT / "libraries/testing/src/rlhf_testing/contracts").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name not in told
    ]
    assert not missing, f"docs/kinds says nothing of the rules {missing}: add a row in words"


def test_every_public_name_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site has a page a module; each name has a heading there and more than its signature."""
    monkeypatch.syspath_prepend(str(DOCS))
    pages = importlib.import_module("reference_api").api_pages("")
    surface = importlib.import_module("public_surface").surface()
    missing, untold = [], []
    for module, names in surface.items():
        page = pages[f"{module}.md"]
        for name in names:
            _, found, part = page.partition(f"\n## `{name}`\n")
            missing += [] if found else [f"{module}.{name}"]
            words = re.sub(r"```.*?```", "", part.partition("\n## ")[0], flags=re.DOTALL)
            untold += [] if words.strip() else [f"{module}.{name}"]
    assert not missing and not untold, f"without a part: {missing}; without a word: {untold}"
