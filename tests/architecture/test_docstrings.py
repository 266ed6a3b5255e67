"""Public names are documented in Google style."""

from __future__ import annotations

import ast

import public_docstrings
import pytest


def test_each_public_name_has_a_complete_docstring() -> None:
    found = [
        f"{path.relative_to(public_docstrings.ROOT)}:{node.lineno}: {name}: {problem}"
        for name, path, node, after in public_docstrings.public_names()
        for problem in public_docstrings.problems(node, after)
    ]
    assert not found, "\n".join(found)


COMPLETE = '''
def scaled(values: Tensor, factor: float) -> Tensor:
    """Multiply values.

    Args:
        values: [B] float32.
        factor: any finite number.

    Returns:
        [B] float32.

    Raises:
        ValueError: if `factor` is not finite.
    """
    if factor != factor:
        raise ValueError("not finite")
    return values * factor
'''


@pytest.mark.parametrize(
    ("part", "instead", "problem"),
    [
        ("        factor: any finite number.\n", "", "no Args: factor"),
        ("    Returns:\n        [B] float32.\n", "", "no Returns:"),
        ("    Raises:\n        ValueError: if `factor` is not finite.\n", "", "no Raises: ValueError"),
        ("Multiply values.", "Multiply values", "the summary does not end with a period"),
    ],
)
def test_a_missing_part_is_found(part: str, instead: str, problem: str) -> None:
    complete, incomplete = (ast.parse(text).body[0] for text in (COMPLETE, COMPLETE.replace(part, instead, 1)))
    assert not [*public_docstrings.problems(complete, None)]
    assert problem in [*public_docstrings.problems(incomplete, None)]
