"""The names that a plugin may import, read from the source.

These are the public names of contract modules except `INSIDE`, the names in the `__init__` stub of each package of
core, and those of libraries. Everything else is private and may move.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "rlhf_core"
CONTRACT = (
    "types",
    "errors",
    "components",
    "protocols",
    "algorithm",
    "strategy",
    "place",
    "hookspecs",
    "batching",
    "episode_view",
)
BUILDING: dict[str, tuple[str, ...]] = {
    "entry.resume": ("load_run_config",),
}
"""Modules with names for transports, which build a run's parts in several processes, and for commands."""
LIBRARY_MODULES: dict[str, tuple[str, ...]] = {
    "rlhf_containment": ("processes", "sandbox"),
    "rlhf_episodes": ("section", "selected", "player", "several_section"),
    "rlhf_testing": ("contracts", "engine", "episodes", "models", "rollouts", "runs", "samples", "strategy_suite"),
}
"""Modules of libraries whose public names count in addition to those of `__init__`."""
_FOR_TRANSPORTS = """
CheckpointStore
BatchPlan EpisodeBatches EpisodeEstimator EpisodeRecord EstimatedEpisode EvaluationRow FitResult
HookRelay ItemSummary LocalTransport CollectedEpisode OwnProcesses PhaseTimer PhaseTimes
PolicyEvaluator PolicyExperienceMaker PrintableFormatter RewardCallOptions RewardCombiner RewardScorer RewardSpec
RolloutCoordinator RunParts RunRequest RunState SamplesLost SingleTurnPlayer Trainer
TrainerParts TrainerSession Transport Updater build_colocated_engine build_strategy
default_micro_batch_tokens evaluation_metrics
load_channel_state load_run_state collected_episode model_dtype load_run_config register_hooks
replace_weights make_reward_spec save_run_state set_up_host_memory verify_weights
"""
FOR_TRANSPORTS = frozenset(_FOR_TRANSPORTS.split())
"""Names for code that assembles a run from parts (transports, the seed's trainers, the test kit), on a second page."""
_INSIDE = """
API_VERSION EpisodeData ExperienceChannel GuardStop HookError Item LostRankError MakerHooks PREFIX SPECS Score
SetupHooks TrainerHooks balanced fills_host_memory full_disk masked single_rank
"""
INSIDE = frozenset(_INSIDE.split())
"""Names of contract modules that only core, the command and libraries use. They are undocumented and may move."""


def surface() -> dict[str, dict[str, str]]:
    """Return module -> public name -> first sentence about it."""
    modules = {"rlhf_core": _exported(CORE)}
    modules |= {f"rlhf_core.{name}": _defined(CORE / f"{name}.py") for name in CONTRACT}
    for package in sorted(path.parent for path in CORE.glob("*/__init__.pyi")):
        modules[f"rlhf_core.{package.name}"] = _exported(package)
    for name, chosen in BUILDING.items():
        modules[f"rlhf_core.{name}"] = {each: _summary(CORE / f"{name.replace('.', '/')}.py", each) for each in chosen}
    return modules


def plugin_page() -> dict[str, dict[str, str]]:
    """Return the names of core for any plugin: module -> name -> sentence. Each name is listed once."""
    return _without_repeats(surface(), lambda name: name not in FOR_TRANSPORTS)


def transport_page() -> dict[str, dict[str, str]]:
    """Return the other names of core that transports, commands and the test kit may import."""
    return _without_repeats(surface(), lambda name: name in FOR_TRANSPORTS)


def _without_repeats(names: dict[str, dict[str, str]], wanted: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    seen: set[str] = set()
    kept: dict[str, dict[str, str]] = {}
    for module, texts in names.items():
        if own := {name: text for name, text in texts.items() if wanted(name) and name not in seen}:
            kept[module] = own
            seen.update(own)
    return kept


def library_surface() -> dict[str, dict[str, str]]:
    """Return module of a library -> public name -> first sentence about it."""
    modules: dict[str, dict[str, str]] = {}
    for folder in sorted(ROOT.glob("libraries/*/src/*/")):
        if names := _exported(folder):
            modules[folder.name] = names
        for name in LIBRARY_MODULES.get(folder.name, ()):
            path = folder / name
            modules[f"{folder.name}.{name}"] = _exported(path) if path.is_dir() else _defined(path.with_suffix(".py"))
    return modules


def defined_in(module: str, name: str) -> tuple[Path, ast.stmt, ast.stmt | None]:
    """Return the file and the statement that define a public name of a module, and the next statement."""
    top = module.partition(".")[0]
    roots = [CORE.parent, *sorted(ROOT.glob("libraries/*/src"))]
    base = next(root for root in roots if (root / top).is_dir()).joinpath(*module.split("."))
    stub = base / "__init__.pyi"
    path = stub if stub.exists() else base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return _find_definition(path, name)


def _find_definition(path: Path, name: str) -> tuple[Path, ast.stmt, ast.stmt | None]:
    body = _body(path)
    for node, after in itertools.zip_longest(body, body[1:]):
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        if is_definition or (isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name):
            return path, node, after
    (origin,) = (origin for imported, origin in _imports(path) if imported == name)
    return _find_definition(origin, name)


def _exported(package: Path) -> dict[str, str]:
    """Return the names that a package's stub re-exports, or those of its `__all__`."""
    stub = package / "__init__.pyi"
    source = stub if stub.exists() else package / "__init__.py"
    imported = [name for name, _ in _imports(source)]
    listed = [node.value for node in _body(source) if isinstance(node, ast.Assign) and _target(node) == "__all__"]
    names = ast.literal_eval(listed[0]) if listed else imported if stub.exists() else []
    return {name: _summary(source, name) for name in sorted(names, key=str.lower)}


def _defined(path: Path) -> dict[str, str]:
    """Return the public classes and functions that a module defines, and its constants with a docstring."""
    return {name: text for name, text in _definitions(path) if text and not name.startswith("_") and name not in INSIDE}


def _summary(path: Path, name: str) -> str:
    """Return the first sentence about a name, from `path` or the file that `path` imports it from."""
    here = dict(_definitions(path))
    if name in here:
        return here[name]
    (origin,) = (origin for imported, origin in _imports(path) if imported == name)
    return _summary(origin, name)


def _definitions(path: Path) -> Iterator[tuple[str, str]]:
    for node, after in itertools.zip_longest(body := _body(path), body[1:]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, _first_sentence(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and (name := _target(node)):
            has_doc = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield name, _first_sentence(str(after.value.value)) if has_doc else ""


def _imports(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield each relative import of a name, with the file that it comes from."""
    for node in _body(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            origin = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            file = origin / "__init__.py" if origin.is_dir() else origin.with_suffix(".py")
            yield from ((alias.asname or alias.name, file) for alias in node.names)


@cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    ends = (match.start() for match in re.finditer(r"\.(?= [A-Z`]|$)", paragraph))
    end = next((end for end in ends if paragraph.count("(", 0, end) == paragraph.count(")", 0, end)), None)
    return paragraph[:end].rstrip(":")
