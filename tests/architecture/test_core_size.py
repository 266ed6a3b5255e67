"""Core only gets smaller: its lines of code and its public names have bounds, which may only be lowered."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

CODE_LINES = 9462
PUBLIC_NAMES = 124
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines with code: blank lines, comments and docstrings are not counted."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def check(what: str, number: int, bound: int, constant: str) -> None:
    assert number <= bound, f"{what}: {number}, at most {bound}. Bring it as a plugin or a library, or take lines out"
    assert number > bound - 50, f"{what}: {number}. Lower {constant} in {Path(__file__).name} to it, so that it stays"


def test_core_has_no_more_code_than_before(root: Path) -> None:
    number = sum(code_lines(path.read_text(encoding="utf-8")) for path in (root / "rlhf_core").rglob("*.py"))
    check("lines of code in rlhf_core", number, CODE_LINES, "CODE_LINES")


def test_core_has_no_more_public_names_than_before(root: Path) -> None:
    page = (root / "docs" / "reference" / "plugin-api.md").read_text(encoding="utf-8")
    check(
        "rows of docs/reference/plugin-api.md",
        len(re.findall(r"^\| `", page, re.MULTILINE)),
        PUBLIC_NAMES,
        "PUBLIC_NAMES",
    )


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("", 0),
        ('"""Docstring\n\nof three lines."""\n', 0),
        ("# comment\n\nx = 1  # and another\n", 1),
        ('def f(a,\n      b):\n    """Docstring."""\n    return """two\nlines"""\n', 4),
    ],
)
def test_what_is_counted(source: str, number: int) -> None:
    assert code_lines(source) == number
