"""What plugins import of core is on the page docs/reference/plugin-api.md, and nothing else is."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS

from rlhf_core.plugins.discovery import discover
from rlhf_core.plugins.selected import load_ref

PAGES = ("plugin-api.md", "transport-api.md", "libraries.md")
PROTOCOLS = {"engines": "RolloutEngine", "prompts": "PromptSource", "rewards": "Reward", "transports": "Transport"}


@pytest.fixture(scope="module")
def public(root: Path) -> dict[str, set[str]]:
    """Module -> the names of it that the pages list, be it under another module of core that has them too."""
    page = "\n".join((root / "docs" / "reference" / name).read_text(encoding="utf-8") for name in PAGES)
    sections = re.split(r"^## `(.+)`$", page, flags=re.MULTILINE)[1:]
    rows = zip(sections[::2], sections[1::2], strict=True)
    listed: dict[str, set[str]] = {}
    for module, text in rows:
        listed.setdefault(module, set()).update(re.findall(r"^\| `(\w+)` \| [^ |]", text, re.MULTILINE))
    of_core = {name for module, names in listed.items() if module.startswith("rlhf_core") for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "docs"))
        surface = importlib.import_module("public_surface").surface()
    core = {module: of_core & names.keys() for module, names in surface.items()}
    return {module: names for module, names in listed.items() if module not in core} | core


@pytest.fixture(scope="module")
def plugin_sources(root: Path, files: list[Path]) -> list[Path]:
    """Plugins, the templates that new ones are made from, and examples; not the tests of ours."""
    ours = [path for path in files if path.suffix == ".py" and path.is_relative_to(root / "plugins")]
    templates = [path for path in files if path.name.endswith(".py.tmpl")]
    examples = [path for path in files if path.suffix == ".py" and path.is_relative_to(root / "examples")]
    return [*(path for path in ours if "src" in path.relative_to(root).parts), *templates, *examples]


def shared_imports(path: Path, packages: frozenset[str]) -> list[tuple[str, str | None]]:
    """(module, name) of each import from core or a library in a file; None as the name: the module itself."""
    text = re.sub(r"\{\{\w+\}\}", "placeholder", path.read_text(encoding="utf-8"))
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in packages:
            found += [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names if alias.name.partition(".")[0] in packages]
    return found


def test_plugins_import_what_is_public_only(root, public, plugin_sources):
    assert len(plugin_sources) > 100
    packages = frozenset({"rlhf_core", *(path.name for path in root.glob("libraries/*/src/*"))})
    private = [
        f"{path.relative_to(root)}: {module}{'' if name is None else f'.{name}'}"
        for path in plugin_sources
        for module, name in shared_imports(path, packages)
        if module not in public or (name is not None and name not in public[module])
    ]
    assert not private, "not in docs/reference/plugin-api.md:\n" + "\n".join(private)


def test_only_who_puts_a_run_together_needs_the_names_of_the_second_page(root, plugin_sources):
    """Transports, the trainers in the seed's style, and commands; libraries may."""
    parts = ("plugins/transports", "plugins/commands", "plugins/algorithms/ppo", "plugins/rewards/http")
    makers = [
        *(root / part for part in parts),
        root / "cli/rlhf_cli/templates/plugin/transport",
        root / "examples/seed",
    ]
    page = (root / "docs" / "reference" / "transport-api.md").read_text("utf-8")
    theirs = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    used = {
        f"{path.relative_to(root)}: {name}"
        for path in plugin_sources
        if not any(path.is_relative_to(maker) for maker in makers)
        for _, name in shared_imports(path, frozenset({"rlhf_core"}))
        if name in theirs
    }
    assert 0 < len(theirs) <= 60
    assert not used


def test_every_public_name_is_there_and_is_told(root, public):
    pages = "\n".join((root / "docs" / "reference" / name).read_text("utf-8") for name in PAGES)
    listed = re.findall(r"^\| `(\w+)` \|", pages, re.MULTILINE)
    libraries = [module for module in public if module.partition(".")[0] != "rlhf_core"]
    of_core = {name for module, names in public.items() if module not in libraries for name in names}
    expected = len(of_core) + sum(len(public[module]) for module in libraries)
    assert len(listed) == expected, "a name without a docstring, or twice on the pages of core"
    # In a process of its own: importing all of core is of no use to the other tests of this one.
    check = """
import importlib, json, sys
for module, names in json.load(sys.stdin).items():
    loaded = importlib.import_module(module)
    print(*(f"{module}.{name}" for name in names if not hasattr(loaded, name)), end="")
"""
    given = json.dumps({module: sorted(names) for module, names in public.items()})
    done = subprocess.run(
        [sys.executable, "-c", check], input=given, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_types_load_little_of_core():
    script = "import rlhf_core.types, json, sys; print(json.dumps([m for m in sys.modules if m[:9] == 'rlhf_core']))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert len(json.loads(done.stdout)) <= 9


def test_functions_are_not_hidden_by_the_files_they_are_in():
    import rlhf_forward

    assert all(not inspect.ismodule(getattr(rlhf_forward, name)) for name in rlhf_forward.__all__)


@pytest.mark.parametrize("kind", sorted(PROTOCOLS))
def test_build_says_which_protocol_it_returns(kind):
    """So that a type checker compares what is built with what core relies on."""
    ours = [load_ref(ref) for ref in discover(kind).values() if ref.distribution.startswith("rlhf-")]
    builds = {each.name: each.component.build for each in ours if each.function is None}
    assert builds
    # A source of prompts may be a stream, by its options; an engine may do more.
    found = {name: returned_by(build).partition(" | ")[0] for name, build in builds.items()}
    found = {name: protocol.replace("InFlightEngine", "RolloutEngine") for name, protocol in found.items()}
    assert found == dict.fromkeys(builds, PROTOCOLS[kind])


def returned_by(build: str) -> str:
    """The annotation of what `module:function` returns, without importing the module."""
    module, _, function = build.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    (found,) = (
        node
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    return "" if found.returns is None else ast.unparse(found.returns)
