"""The steps of docs/first-hour.md, which tests/soak/test_first_hour.py follows."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_steps import Commands, File, page_steps

PAGE = Path(__file__).parents[2] / "docs" / "first-hour.md"
FENCE = "```"


def test_the_page_of_the_first_hour_is_followed_whole():
    steps = page_steps(PAGE.read_text(encoding="utf-8"))
    assert [step.name for step in steps if isinstance(step, File)] == ["make_prompts.py", "in_place.py", "run.yaml"]
    lines = [line for step in steps if isinstance(step, Commands) for line in step.lines]
    assert lines[0] == "pip install rlhf-start" and len(lines) > 20
    meanwhile = [step for step in steps if isinstance(step, Commands) and step.in_another_terminal]
    assert [step.lines[-1] for step in meanwhile] == ["rlhf dashboard"]
    assert steps[steps.index(meanwhile[0]) - 1] == Commands(("rlhf train --output runs/first",))


def test_a_command_may_have_several_lines_and_another_terminal_a_remark():
    page = f"{FENCE}\na \\\n  b\n\nc\n{FENCE}\nThen in another\nterminal (Ctrl-C ends it):\n\n{FENCE}sh\nd\n{FENCE}\n"
    assert page_steps(page) == [Commands(("a    b", "c")), Commands(("d",), in_another_terminal=True)]


def test_a_file_has_a_name():
    with pytest.raises(ValueError, match="file's name"):
        page_steps(f"{FENCE}yaml\nmodel: {{}}\n{FENCE}\n")
