"""ARCHITECTURE.md and docs/inside.md name files and definitions that exist, and the first is short."""

import ast
import re
from pathlib import Path

import pytest

MOST_LINES, MOST_CHARACTERS = 160, 120
"""Four screens."""
NAMED = re.compile(r"`([\w/]+\.py)`(?:\s+`([\w.]+)`)?")


def definitions(path: Path) -> set[str]:
    """Names of a file's classes and functions; those of a class as `Class.name`, and alone."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= {f"{node.name}.{inner.name}", inner.name}
    return found


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/inside.md"])
def test_files_and_definitions_on_the_map_exist(root: Path, page: str) -> None:
    places = [
        root,
        root / "rlhf_core",
        *root.glob("plugins/*/*/src"),
        *root.glob("libraries/*/src"),
    ]
    named = NAMED.findall((root / page).read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, name in named:
        if file in {"plugin.py", "config.py"}:  # of any plugin
            continue
        path = next((place / file for place in places if (place / file).is_file()), None)
        assert path is not None, f"{file} is no file"
        if name:
            assert name in definitions(path), f"{file} has no {name}"


def test_the_map_fits_on_four_screens(root: Path) -> None:
    lines = (root / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES, "what is left out goes to docs/inside.md"
    assert not [line for line in lines if len(line) > MOST_CHARACTERS]


def test_every_room_is_on_the_map(root: Path) -> None:
    page = (root / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = [path.parent.name for path in (root / "rlhf_core").glob("*/__init__.py")]
    missing = [room for room in rooms if not re.search(rf"^  (?:.* )?{room}/ ", page, re.MULTILINE)]
    assert not missing, f"ARCHITECTURE.md says nothing of {missing}"


@pytest.mark.parametrize("limit", [13])
def test_few_modules_lie_beside_the_rooms(root: Path, limit: int) -> None:
    modules = sorted(path.name for path in (root / "rlhf_core").glob("*.py"))
    assert len(modules) <= limit, f"which room do they belong to? {modules}"
