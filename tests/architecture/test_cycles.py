"""No files import each other in a circle: not at the top, not inside functions, not for type checkers alone.

In core, imports for type checkers are left out: annotations of the methods of `Section` name what a run is made of.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CORE = "rlhf_core"


def packages(root: Path) -> list[Path]:
    sources = [*root.glob("plugins/*/*/src/*"), *root.glob("libraries/*/src/*"), *root.glob("start/src/*")]
    return [root / CORE, root / "cli" / "rlhf_cli", *(path for path in sources if (path / "__init__.py").exists())]


def imported(path: Path, package: str, *, with_types: bool) -> Iterator[tuple[str, str]]:
    """(module, name) of each import in a file. package: what its relative imports start from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    types = set() if with_types else {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            start = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def import_graph(package: Path) -> dict[str, set[str]]:
    """Module of a package -> those of its modules that it imports; a lazy package's names lead to where they are."""
    base = package.parent
    files = {".".join(path.relative_to(base).with_suffix("").parts): path for path in package.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    lazy = {
        f"{name}.{each}": module
        for name, path in files.items()
        if (stub := path.with_suffix(".pyi")).exists()
        for module, each in imported(stub, name, with_types=True)
    }

    def found(module: str, name: str) -> str | None:
        whole = f"{module}.{name}"
        if whole in lazy:
            return lazy[whole]
        return next((each for each in (whole, module) if each in files), None)

    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        own = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = {found(*each) for each in imported(path, own, with_types=package.name != CORE)}
        graph[name] = {target for target in targets if target is not None and target != name}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_files_import_each_other_in_a_circle(root: Path) -> None:
    found = [circle(import_graph(package)) for package in packages(root)]
    assert [" -> ".join(each) for each in found if each] == []


@pytest.mark.parametrize("late", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "])
def test_a_circle_is_found(tmp_path: Path, late: str) -> None:
    package = tmp_path / "acme"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__init__.pyi").write_text("from .b import b as b\n")
    (package / "a.py").write_text("from . import b\n")
    (package / "b.py").write_text(f"{late}from .c import c\n")
    (package / "c.py").write_text("import acme.a\n")
    assert sorted(circle(import_graph(package))[1:]) == ["acme.a", "acme.b", "acme.c"]
    (package / "c.py").write_text("")
    assert circle(import_graph(package)) == []
