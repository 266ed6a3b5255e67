"""Names that must not be there twice, or for nothing."""

import ast
import re
from collections import Counter
from pathlib import Path


def classes_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


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
