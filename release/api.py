"""Compare the public names of core with those of the last release: `python release/api.py [--record]`.

`release/api/` holds, a file a module, what a release had: signatures, fields, types and defaults, without bodies and
docstrings. griffe finds what would break a plugin that was written for it. Such a change has to be wanted: a fragment
`changes/*.breaking.md` that names it (`rlhf_core.types.Rollout.prompt`) and says what to do instead lets it pass.
`--record` writes the folder anew, when a release is made.
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
    """Module -> the declarations of its public names, as they are now."""
    return {
        module: "\n\n".join(ast.unparse(pared(defined_in(module, name)[1])) for name in names) + "\n"
        for module, names in surface().items()
    }


def pared(node: ast.stmt) -> ast.stmt:
    """A declaration without body and docstrings; of a class its public members."""
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
        if node.name.startswith("test_"):  # of a contract suite: pytest calls them, nobody else
            return False
        return not node.name.startswith("_") or node.name in {"__init__", "__call__", "__len__", "__getitem__"}
    if isinstance(node, ast.AnnAssign):
        return not ast.unparse(node.target).startswith("_")
    return isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith("_")


def breakages() -> Iterator[tuple[str, str]]:
    """What a plugin written for the recorded release would trip over: its path, and how it changed."""
    now = declared()
    for path in sorted(RECORDED.glob("*.pyi")):
        module = path.stem
        if module not in now:
            yield module, "the module is gone"
            continue
        old = griffe.visit(module, filepath=path, code=path.read_text(encoding="utf-8"))
        new = griffe.visit(module, filepath=path, code=now[module])
        for breakage in griffe.find_breaking_changes(old, new):
            yield breakage.obj.path, f"{breakage.kind.value}: {breakage.old_value} -> {breakage.new_value}"


def unwanted() -> list[str]:
    """The breakages that no fragment names."""
    told = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CHANGES.glob("*.breaking*.md")))
    return [
        f"{path}: {how}. If this is meant, say in changes/NAME.breaking.md what to do instead, naming `{path}`"
        for path, how in breakages()
        if f"`{path}`" not in told and not has_moved(path)
    ]


def has_moved(path: str) -> bool:
    """Whether a name, or its module or class, is in docs/reference/moved-names.md."""
    parts = path.split(".")
    return any(".".join(parts[:length]) in moved_names() for length in range(2, len(parts) + 1))


def record() -> None:
    """Write the folder of declarations anew."""
    RECORDED.mkdir(exist_ok=True)
    for old in RECORDED.glob("*.pyi"):
        old.unlink()
    for module, text in declared().items():
        Path(RECORDED / f"{module}.pyi").write_text(text, encoding="utf-8")


def main() -> int:
    """Print what is broken and unsaid; or record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="take what there is now as the release")
    if parser.parse_args().record:
        record()
        return 0
    found = unwanted()
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
