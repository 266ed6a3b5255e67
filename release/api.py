"""Compare the public names of core with those of the last release: `python release/api.py [--record]`.

`release/api/` contains a file per module with the declarations of a release: signatures, fields, types and defaults,
without bodies and docstrings. griffe finds changes that break plugins written for that release. Such a change must be
intended: it passes if a fragment `changes/*.breaking.md` names it (`rlhf_core.types.Rollout.prompt`) and its
replacement. `--record` rewrites the folder for a release.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import griffe
from distributions import ROOT

sys.path.append(str(ROOT / "docs"))

from public_surface import defined_in, surface

from rlhf_core.plugins.names import moved_names

RECORDED = ROOT / "release" / "api"
CHANGES = ROOT / "changes"


def declared() -> dict[str, str]:
    """Return module -> the current declarations of its public names."""
    return {
        module: "\n\n".join(ast.unparse(pared(defined_in(module, name)[1])) for name in names) + "\n"
        for module, names in surface().items()
    }


def pared(node: ast.stmt) -> ast.stmt:
    """Return a declaration without body and docstrings, for a class with its public members."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.copy_location(_like(node), node)
    if isinstance(node, ast.ClassDef):
        members = [pared(each) for each in node.body if _is_public(each)]
        fields = {field: getattr(node, field) for field in node._fields}
        return ast.ClassDef(**{**fields, "body": members or [ast.Expr(ast.Constant(...))]})
    return node


def _like(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    fields = {field: getattr(node, field) for field in node._fields}
    return type(node)(**{**fields, "body": [ast.Expr(ast.Constant(...))]}, lineno=node.lineno)


def _is_public(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        if node.name.startswith("test_"):  # of a contract suite, called only by pytest
            return False
        return not node.name.startswith("_") or node.name in {"__init__", "__call__", "__len__", "__getitem__"}
    if isinstance(node, ast.AnnAssign):
        return not ast.unparse(node.target).startswith("_")
    return isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith("_")


def breakages() -> Iterator[tuple[str, str]]:
    """Yield the breaking changes since the recorded release: path and change."""
    now = declared()
    for path in sorted(RECORDED.glob("*.pyi")):
        module = path.stem
        if module not in now:
            yield module, "the module is removed"
            continue
        old = griffe.visit(module, filepath=path, code=path.read_text(encoding="utf-8"))
        new = griffe.visit(module, filepath=path, code=now[module])
        for breakage in griffe.find_breaking_changes(old, new):
            yield breakage.obj.path, f"{breakage.kind.value}: {breakage.old_value} -> {breakage.new_value}"


def unwanted() -> list[str]:
    """Return the breaking changes that are not in a fragment."""
    fragments = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CHANGES.glob("*.breaking*.md")))
    return [
        f"{path}: {how}. If this is intended, describe the replacement of `{path}` in changes/NAME.breaking.md"
        for path, how in breakages()
        if f"`{path}`" not in fragments and not has_moved(path)
    ]


def has_moved(path: str) -> bool:
    """Whether a name, or its module or class, is in docs/reference/moved-names.md."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in moved_names() for length in range(2, len(parts) + 1))


def record() -> None:
    """Rewrite the folder of declarations."""
    RECORDED.mkdir(exist_ok=True)
    for old in RECORDED.glob("*.pyi"):
        old.unlink()
    for module, text in declared().items():
        Path(RECORDED / f"{module}.pyi").write_text(text, encoding="utf-8")


def main() -> int:
    """Print undocumented breaking changes, or record the declarations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="record the current names as the release")
    if parser.parse_args().record:
        record()
        return 0
    found = unwanted()
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
