"""What files of core and of plugins import when they are loaded. `make lint` checks the contracts of pyproject.toml."""

import ast
import re
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "transformers", "peft", "safetensors", "ray", "colossalai", "vllm", "matplotlib", "numpy"}
TENSOR_CODE = {f"models/{name}.py" for name in ("compiled", "forward", "forward_passes", "own_lengths", "rows")}
"""Files of other rooms that work on tensors throughout, as those of `functional/` do."""


def imports_at_load(path: Path) -> set[str]:
    """Modules a file imports when it is loaded: neither in a function nor for type checkers only."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add("." * node.level + (node.module or ""))
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                visit(node.orelse)
            elif isinstance(node, ast.ClassDef | ast.If | ast.With | ast.Try):
                for name in ("body", "orelse", "finalbody"):
                    visit(getattr(node, name, []))

    visit(ast.parse(path.read_text(encoding="utf-8")).body)
    return found


def test_core_is_import_light(root: Path, library_files: list[Path]) -> None:
    core = root / "rlhf_core"
    heavy = {
        str(path.relative_to(root)): sorted(found)
        for path in library_files
        if path.is_relative_to(core)
        and path != core / "batching.py"
        and not path.is_relative_to(core / "functional")
        and path.relative_to(core).as_posix() not in TENSOR_CODE
        and (found := {name for name in imports_at_load(path) if name.split(".")[0] in HEAVY})
    }
    assert not heavy, f"import these inside the functions that need them: {heavy}"


def test_plugin_and_config_modules_import_pydantic_and_core_only(root: Path, library_files: list[Path]) -> None:
    libraries = {path.name for path in root.glob("libraries/*/src/*")}
    allowed = {"pydantic", "pydantic_core", "rlhf_core", "typing_extensions", *libraries, *sys.stdlib_module_names}
    modules = [
        path
        for path in library_files
        if "src" in path.parts and (path.name == "plugin.py" or path.name.endswith("config.py"))
    ]
    assert modules
    wrong = {
        str(path.relative_to(root)): sorted(found)
        for path in modules
        if (
            found := {
                name
                for name in imports_at_load(path)
                # A plugin.py may take its schema from the config.py beside it, and this a part from X_config.py.
                if name.split(".")[0] not in allowed
                and not re.fullmatch(rf"({path.parent.name})?\.(\w+_)?config", name)
            }
        )
    }
    assert not wrong, f"only pydantic, rlhf_core, libraries and the config beside may be imported here: {wrong}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch", {"torch"}),
        ("from torch import nn", {"torch"}),
        ("from .a import b", {".a"}),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import json", {"json"}),
        ("def f():\n    import torch", set()),
        ("class A:\n    import torch", {"torch"}),
        ("try:\n    import ray\nfinally:\n    import json", {"ray", "json"}),
    ],
)
def test_the_check_sees_what_is_imported_at_load(tmp_path: Path, text: str, expected: set[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(text, encoding="utf-8")
    assert imports_at_load(path) == expected
