"""Names that must not be there twice, or for nothing."""

import ast
import re
from collections import Counter
from pathlib import Path

CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)


def classes_of(path: Path) -> list[str]:
    return CLASS.findall(path.read_text(encoding="utf-8"))


def test_an_error_is_one_class(library_files: list[Path]) -> None:
    """An `except` of the one would miss the other."""
    errors = Counter(name for path in library_files for name in classes_of(path) if name.endswith("Error"))
    twice = [name for name, count in errors.items() if count > 1]
    assert not twice, f"defined more than once: {twice}"


def test_every_protocol_is_asked_for(root: Path, library_files: list[Path]) -> None:
    home = root / "rlhf_core" / "protocols.py"
    elsewhere = "\n".join(path.read_text(encoding="utf-8") for path in library_files if path != home)
    unused = [name for name in classes_of(home) if not re.search(rf"\b{name}\b", elsewhere)]
    assert not unused, f"nothing outside of protocols.py names {unused}"


def test_no_name_of_a_test_depends_on_the_order_of_a_set(root: Path, python_files: list[Path]) -> None:
    """Each pytest worker has its own hash seed, and a run with several workers needs the same names in all."""
    found = []
    for path in python_files:
        source = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source if ".parametrize(" in source else "")):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and len(call.args) > 1):
                continue
            if call.func.attr == "parametrize":
                named_by_value = any(keyword.arg == "ids" for keyword in call.keywords)
                nodes = ast.walk(call.args[1]) if named_by_value else [call.args[1]]
                if any(isinstance(node, ast.Set | ast.SetComp) for node in nodes):
                    found.append(f"{path.relative_to(root)}:{call.lineno}")
    assert not found, f"write a tuple or a sorted list: {found}"
