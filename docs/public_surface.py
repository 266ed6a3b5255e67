"""What a plugin may import, read from the source.

Three kinds of modules: those of the contract, whose public names count but for `INSIDE`; the rooms, with the names in
the stub of their `__init__`; and the modules of `rlhf_testing`. Everything else is private and may move.
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
"""Modules of which some names are for transports, which make a run's parts in processes of their own, and commands."""
LIBRARY_MODULES: dict[str, tuple[str, ...]] = {
    "rlhf_containment": ("processes", "sandbox"),
    "rlhf_episodes": ("section", "selected", "player"),
    "rlhf_testing": ("contracts", "engine", "episodes", "models", "rollouts", "runs", "samples", "strategy_suite"),
}
"""Modules of libraries whose public names count besides those of `__init__`."""
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
"""Names for who puts a run together from its parts: transports, the seed's trainers, the test kit. On a second page."""
_INSIDE = """
API_VERSION EpisodeData ExperienceChannel GuardStop HookError Item LostRankError MakerHooks PREFIX SPECS Score
SetupHooks TrainerHooks balanced fills_host_memory full_disk masked single_rank
"""
INSIDE = frozenset(_INSIDE.split())
"""Names of the contract's modules that only core, the command and libraries use: they are on no page, and may move."""


def surface() -> dict[str, dict[str, str]]:
    """Module -> public name -> a few words about it."""
    found = {"rlhf_core": _exported(CORE)}
    found |= {f"rlhf_core.{name}": _defined(CORE / f"{name}.py") for name in CONTRACT}
    for room in sorted(path.parent for path in CORE.glob("*/__init__.pyi")):
        found[f"rlhf_core.{room.name}"] = _exported(room)
    for name, chosen in BUILDING.items():
        found[f"rlhf_core.{name}"] = {each: _says(CORE / f"{name.replace('.', '/')}.py", each) for each in chosen}
    return found


def plugin_page() -> dict[str, dict[str, str]]:
    """What any plugin may import of core: module -> name -> a few words; each name in the first module that has it."""
    return _once(surface(), lambda name: name not in FOR_TRANSPORTS)


def transport_page() -> dict[str, dict[str, str]]:
    """What transports, commands and the test kit may import of core besides."""
    return _once(surface(), lambda name: name in FOR_TRANSPORTS)


def _once(names: dict[str, dict[str, str]], wanted: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    seen: set[str] = set()
    found: dict[str, dict[str, str]] = {}
    for module, told in names.items():
        if own := {name: text for name, text in told.items() if wanted(name) and name not in seen}:
            found[module] = own
            seen.update(own)
    return found


def library_surface() -> dict[str, dict[str, str]]:
    """Module of a library -> public name -> a few words about it."""
    found: dict[str, dict[str, str]] = {}
    for folder in sorted(ROOT.glob("libraries/*/src/*/")):
        if names := _exported(folder):
            found[folder.name] = names
        for name in LIBRARY_MODULES.get(folder.name, ()):
            path = folder / name
            found[f"{folder.name}.{name}"] = _exported(path) if path.is_dir() else _defined(path.with_suffix(".py"))
    return found


def defined_in(module: str, name: str) -> tuple[Path, ast.stmt, ast.stmt | None]:
    """The file and the statement that define a public name of a module, and the next statement."""
    top = module.partition(".")[0]
    roots = [CORE.parent, *sorted(ROOT.glob("libraries/*/src"))]
    base = next(root for root in roots if (root / top).is_dir()).joinpath(*module.split("."))
    stub = base / "__init__.pyi"
    path = stub if stub.exists() else base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return _defining(path, name)


def _defining(path: Path, name: str) -> tuple[Path, ast.stmt, ast.stmt | None]:
    body = _body(path)
    for node, after in itertools.zip_longest(body, body[1:]):
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        if is_definition or (isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name):
            return path, node, after
    (origin,) = (origin for imported, origin in _imports(path) if imported == name)
    return _defining(origin, name)


def _exported(room: Path) -> dict[str, str]:
    """The names that a package's stub re-exports, or those of its `__all__`."""
    stub = room / "__init__.pyi"
    source = stub if stub.exists() else room / "__init__.py"
    imported = [name for name, _ in _imports(source)]
    listed = [node.value for node in _body(source) if isinstance(node, ast.Assign) and _target(node) == "__all__"]
    names = ast.literal_eval(listed[0]) if listed else imported if stub.exists() else []
    return {name: _says(source, name) for name in sorted(names, key=str.lower)}


def _defined(path: Path) -> dict[str, str]:
    """The public classes and functions that a module defines, and its constants that have a docstring."""
    found = _definitions(path)
    return {name: text for name, text in found if text and not name.startswith("_") and name not in INSIDE}


def _says(path: Path, name: str) -> str:
    """The first sentence about a name, in `path` or where that has it from."""
    here = dict(_definitions(path))
    if name in here:
        return here[name]
    (origin,) = (origin for imported, origin in _imports(path) if imported == name)
    return _says(origin, name)


def _definitions(path: Path) -> Iterator[tuple[str, str]]:
    for node, after in itertools.zip_longest(body := _body(path), body[1:]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, _first_sentence(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and (name := _target(node)):
            is_told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield name, _first_sentence(str(after.value.value)) if is_told else ""


def _imports(path: Path) -> Iterator[tuple[str, Path]]:
    """Each name that is imported from core, with the file it comes from."""
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
